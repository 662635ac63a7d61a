"""The ``llmperf`` command: what baselines hold and predict, nights submitted and merged. It changes no baseline."""

from pytest_llmperf.cli.main import main

__all__ = ["main"]
