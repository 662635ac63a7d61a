"""``--perf-markdown``, and the file in which GitHub Actions wants the summary of a step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# GitHub's; empty or absent elsewhere.
_STEP_SUMMARY = "GITHUB_STEP_SUMMARY"


def add_options(group: pytest.OptionGroup) -> None:
    """Register the command line's."""
    group.addoption("--perf-markdown", metavar="FILE", help="write the run as a page of Markdown")


def step_summary() -> Path | None:
    """That file, where there is one."""
    value = os.environ.get(_STEP_SUMMARY, "")
    return Path(value) if value else None
