"""Where runs keep their history unless they are told otherwise."""

from __future__ import annotations

from pathlib import Path

from pytest_llmperf.support.folders import state_folder


def usual_history() -> Path:
    """One file for all projects of a user: a case is what its settings say, whoever launches it."""
    return state_folder() / "history.sqlite"
