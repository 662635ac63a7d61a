"""The ``llmperf`` command: what baselines hold and predict, nights submitted and merged. It changes no baseline."""

from pytest_llmperf.cli.entry_point import main

__all__ = ["main"]
