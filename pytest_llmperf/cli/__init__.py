"""The ``llmperf`` command: reads baselines and says what they hold. It changes nothing and needs no GPU."""

from pytest_llmperf.cli.command import main

__all__ = ["main"]
