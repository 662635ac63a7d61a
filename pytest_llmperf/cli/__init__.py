"""The ``llmperf`` command: what baselines hold and predict, cases checked without pytest, nights submitted and merged.

``commands`` has a module for each, with its options and its answer, imported once it is called; ``answer`` names
them, ``entry_point`` prints what they answer; ``night_log`` has merge and nights. May import: every room but
``plugin`` and ``worker``."""

from pytest_llmperf.cli.entry_point import main

__all__ = ["main"]
