"""The ``llmperf`` command: what baselines hold and predict, cases checked without pytest, nights submitted and merged.

A folder for each command; ``arguments`` has their options, ``entry_point`` chooses among them. May import: every
room but ``plugin`` and ``worker``.
"""

from pytest_llmperf.cli.entry_point import main

__all__ = ["main"]
