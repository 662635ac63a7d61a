"""What a recording refuses before anything is launched, and of launches that disagree."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_llmperf.judge import store as store_module
from pytest_llmperf.judge.baseline import BaselineStore
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.store import BaselineError
from pytest_llmperf.judge.verdict import judge
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.run.case import Caller, CaseTerms
from pytest_llmperf.run.conclusion import Recorder
from pytest_llmperf.run.derived_metrics import ModelFlops
from pytest_llmperf.run.findings import Findings
from pytest_llmperf.run.history import Revision
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import launch_of
from tests.golden import Golden
from tests.shelf import baseline_at

SPEC = TrainSpec(model="llama-tiny", sequence_length=64, steps=12, warmup_steps=4)
STORED = baseline_at(SPEC, 640.0)


def recorder(root: Path, update: str | None, changed: tuple[str, ...] = (), reason: str = "") -> Recorder:
    session: Any = SimpleNamespace(
        settings=SimpleNamespace(update=update, reason=reason),
        store=BaselineStore(root / "baselines"),
        machine_kind="m",
        revision=Revision("0123456789ab", changed),
    )
    return Recorder(Caller(run=session, terms=CaseTerms(), findings=Findings(), observer=session, nodeid="t.py::t"))


@pytest.fixture(autouse=True)
def _locks_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_LOCKS", str(tmp_path / "locks"))


class TestAnUncommittedTree:
    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            (("a.py",), "(a.py); commit them"),
            (("a.py", "b.py", "c.py"), "(a.py, b.py, c.py); commit them"),
            (("a.py", "b.py", "c.py", "d.py", "e.py"), "(a.py, b.py, c.py and 2 more); commit them"),
        ],
    )
    def test_it_replaces_nothing_without_a_reason(
        self, tmp_path: Path, changed: tuple[str, ...], said: str, golden: Golden
    ) -> None:
        with pytest.raises(BaselineError) as caught:
            recorder(tmp_path, "all", changed).prepare(SPEC, STORED)
        golden(str(caught.value))
        recorder(tmp_path, "all", changed, reason="why").prepare(SPEC, STORED)

    @pytest.mark.parametrize("update", [None, "new"])
    def test_it_is_nobodys_business_where_nothing_is_recorded(self, tmp_path: Path, update: str | None) -> None:
        recorder(tmp_path, update, ("a.py",)).prepare(SPEC, STORED)
        assert not (tmp_path / "baselines").exists()

    def test_a_clean_one_needs_no_reason(self, tmp_path: Path) -> None:
        recorder(tmp_path, "all").prepare(SPEC, STORED)


class TestLaunchesThatDisagree:
    @staticmethod
    def result() -> CaseResult:
        launches = (launch_of(SPEC),)
        checks = judge(launches, None, Policy.for_gpu()).checks
        return CaseResult(
            id=SPEC.id,
            digest=SPEC.digest,
            nodeid="t.py::t",
            machine="m",
            verdict="new",
            reason="",
            checks=checks,
            launches=launches,
        )

    def test_they_are_recorded_with_a_reason_alone(self, tmp_path: Path, golden: Golden) -> None:
        with pytest.raises(BaselineError) as refused:
            recorder(tmp_path, "all").record(SPEC, self.result(), None, "launches disagree")
        golden(refused)
        assert not (tmp_path / "baselines").exists()
        told = recorder(tmp_path, "all", reason="why").record(SPEC, self.result(), None, "launches disagree")
        assert "(why)" in told.updated

    def test_those_that_agree_need_none(self, tmp_path: Path) -> None:
        assert "recorded" in recorder(tmp_path, "all").record(SPEC, self.result(), None, "").updated


def test_a_micro_batch_has_seconds_of_its_own_where_a_step_has_several() -> None:
    accumulated = TrainSpec(model="llama-tiny", sequence_length=64, gradient_accumulation_steps=2)
    for spec, names in ((SPEC, []), (accumulated, ["micro_batch_seconds"])):
        assert [check.metric for check in ModelFlops().figures(spec, (launch_of(spec),))] == names
