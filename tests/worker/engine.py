"""The engine alone, launching for real: cases checked in this process, each in a run of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_llmperf import TrainSpec
from pytest_llmperf.run.case import Caller, CaseTerms
from pytest_llmperf.run.cases import Cases
from pytest_llmperf.run.findings import Findings
from pytest_llmperf.run.options import Settings
from pytest_llmperf.run.run import Run
from tests.engine.conftest import Heard
from tests.worker import launching

#: As the fixture ``train_spec`` makes it on the CPU.
SPEC = TrainSpec(model="llama-tiny", attention="sdpa", sequence_length=64, steps=20)


def checks(folder: Path, **settings: Any) -> Cases:
    """What a new run on the CPU may be asked for, its baselines in ``folder``, its launches warm and so are others'."""
    asked = Settings(**{"gpus": 0, "baselines": folder / "baselines", "start": "warm", **settings})
    context = Run(asked, rootdir=folder)
    vars(context.site)["_servers"] = launching.shared_pool()[0]
    return Cases(
        Caller(run=context, terms=CaseTerms(), findings=Findings(), observer=Heard(), nodeid="test_mine.py::test_it")
    )
