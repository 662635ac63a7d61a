"""The ``llmperf`` command: what baselines hold and predict, cases checked without pytest, nights submitted and merged.

``commands`` has a module for each, or for those of one thing, with its options and its answer, imported once it is
called; ``answer`` names them and prints what they answer. May import: every room but ``plugin`` and ``worker``."""

from pytest_llmperf.cli.answer import main

__all__ = ["main"]
