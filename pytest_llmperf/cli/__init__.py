"""The ``llmperf`` command: what baselines hold and predict, cases checked without pytest, nights submitted and merged.

A folder for each command, whose ``command.py`` has its options and its answer and is imported once it is called;
``arguments`` names them, ``entry_point`` prints what they answer. May import: every room but ``plugin`` and ``worker``.
"""

from pytest_llmperf.cli.entry_point import main

__all__ = ["main"]
