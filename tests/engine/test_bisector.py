"""One bisection with fake launches: what it finds, what it skips, and that it goes on where it was ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from filelock import FileLock

from pytest_llmperf.launch.histories import History, NoRoomError, NotMadeError, Span
from pytest_llmperf.records.result import Candidate
from pytest_llmperf.run.bisection import Bisection, BisectionOrder, Bisector
from pytest_llmperf.run.findings import CaseFailedError
from tests.engine.conftest import SPEC, Engine
from tests.golden import Golden

NAMES = [f"v{number}" for number in range(9)]
SLOW: dict[str, Any] = {"step_seconds": 1.0}
# The fake launcher looks for a part of the interpreter's name.
ORDER = BisectionOrder(by="speed")


@dataclass(frozen=True)
class Versions:
    """Interpreters that nobody has."""

    not_made: Mapping[str, str] = field(default_factory=dict)
    key: tuple[str, ...] = ("versions",)

    def span(self, good: str, bad: str) -> Span:
        names = NAMES[NAMES.index(good) : NAMES.index(bad) + 1]
        rest = [Candidate(name, (before,)) for before, name in pairwise(names)]
        return Span(Candidate(good), tuple(rest))

    def python(self, candidate: Candidate) -> str:
        if candidate.name in self.not_made:
            raise NotMadeError(self.not_made[candidate.name])
        return f"python-{candidate.name}"

    def further(self, candidate: Candidate) -> str:
        return f"look at {candidate.name}"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMPERF_CACHE_DIR", str(tmp_path / "cache"))


def bisect(
    engine: Engine, order: BisectionOrder = ORDER, history: Versions | None = None, good: str = "v0"
) -> Bisection:
    history = history or Versions()
    caller = engine.caller(gpus=0, max_launches=order.max_pairs)
    return Bisector(caller, SPEC, order, cast("History", history), engine.heard.say).run(history.span(good, "v8"))


def from_on(first: int, values: Mapping[str, Any] = SLOW) -> dict[str, Mapping[str, Any]]:
    return {f"python-v{number}": values for number in range(first, 9)}


@pytest.mark.parametrize("first", [1, 2, 5, 8])
def test_the_first_slow_version_is_found(engine: Engine, first: int) -> None:
    engine.fake(by=from_on(first))
    found = bisect(engine)
    assert found.first_bad is not None
    assert found.last_good is not None
    assert (found.first_bad.name, found.last_good.name) == (f"v{first}", f"v{first - 1}")
    assert found.yardstick is not None
    assert found.yardstick.by == "speed"
    assert found.change is not None
    assert found.change.log == pytest.approx(2.302585)
    assert found.change.low < found.change.log < found.change.high
    assert len(found.steps) == 1 + 3
    assert 0.95 <= found.confidence < 1
    assert {launched.split()[0] for launched in engine.launches} == {SPEC.id}


def test_what_became_faster_is_found_as_well(engine: Engine) -> None:
    engine.fake(by=from_on(4, {"step_seconds": 0.01}))
    found = bisect(engine)
    assert found.first_bad is not None
    assert found.change is not None
    assert (found.first_bad.name, found.change.log < -2) == ("v4", True)


def test_ends_that_do_not_differ_end_it(engine: Engine) -> None:
    found = bisect(engine, replace(ORDER, by="counts"))
    assert (found.yardstick, found.first_bad, found.suspects) == (None, None, ())
    assert len(engine.launches) == 2


def test_counts_decide_by_one_pair_a_step_whatever_the_clock_says(engine: Engine) -> None:
    then, now = ({"trace": {"operator": {"aten::mm": count}}} for count in (10.0, 12.0))
    engine.fake(**then, by=from_on(6, now) | {"python-v3": {**then, "step_seconds": 3.0}})
    found = bisect(engine, replace(ORDER, by=None))
    assert found.first_bad is not None
    assert (found.first_bad.name, found.confidence) == ("v6", 1.0)
    assert len(engine.launches) == 2 * 4
    assert "operators: 10 -> 12" in found.exact
    assert "aten::mm" in found.diagnosis
    assert [note.endswith("they decided nothing here") for note in found.notes] == [True]


@pytest.mark.parametrize("how", ["not made", "did not train"])
def test_what_cannot_be_launched_is_skipped_with_its_reason_and_its_neighbours_are_tried(
    engine: Engine, how: str
) -> None:
    failing = {"python-v4": {"fail": "error"}, "python-v5": {"fail": "error"}} if how == "did not train" else {}
    engine.fake(by=from_on(5) | failing)
    broken = {"v4": "no wheel", "v5": "no wheel"} if how == "not made" else {}
    found = bisect(engine, history=Versions(broken))
    assert found.first_bad is None
    assert [one.name for one in found.suspects] == ["v4", "v5", "v6"]
    reasons = {step.candidate.name: step.reason for step in found.steps if step.side == "skipped"}
    assert set(reasons) == {"v4", "v5"}
    assert all(("no wheel" if how == "not made" else "it broke") in reason for reason in reasons.values())


@pytest.mark.parametrize(("end", "option"), [("v0", "--good v0"), ("v8", "--bad v8")])
def test_an_end_that_does_not_train_is_an_error(engine: Engine, end: str, option: str, golden: Golden) -> None:
    engine.fake(by={f"python-{end}": {"fail": "error"}})
    with pytest.raises(CaseFailedError) as raised:
        bisect(engine)
    golden(raised)
    with pytest.raises(CaseFailedError, match=rf"^{option}: no wheel"):
        bisect(engine, history=Versions({end: "no wheel"}))


def test_an_end_that_failed_is_tried_again(engine: Engine) -> None:
    engine.fake(by={"python-v8": {"fail": "error"}})
    with pytest.raises(CaseFailedError):
        bisect(engine)
    engine.fake(by=from_on(8))
    found = bisect(engine)
    assert found.first_bad is not None
    assert found.first_bad.name == "v8"


def test_a_full_disk_ends_it_in_one_line_and_nothing_is_taken_for_skipped(engine: Engine, golden: Golden) -> None:
    @dataclass(frozen=True)
    class Full(Versions):
        def python(self, candidate: Candidate) -> str:
            if candidate.name == "v4":
                raise NoRoomError("no room")
            return super().python(candidate)

    engine.fake(by=from_on(3))
    with pytest.raises(CaseFailedError) as raised:
        bisect(engine, history=Full())
    golden(raised)
    engine.fake(by=from_on(3) | {"python-v4": {"fail": "unwritable"}})
    with pytest.raises(CaseFailedError, match=r"launch failed \(unwritable\)"):
        bisect(engine)
    engine.fake(by=from_on(3))
    found = bisect(engine)
    assert found.first_bad is not None
    assert found.first_bad.name == "v3"


def test_a_failure_that_need_not_last_is_tried_again_by_the_next(engine: Engine) -> None:
    engine.fake(by=from_on(3) | {"python-v3": {"fail": "timeout"}})
    assert bisect(engine).first_bad is None
    engine.fake(by=from_on(3))
    found = bisect(engine)
    assert found.first_bad is not None
    assert found.first_bad.name == "v3"


def test_a_version_in_which_an_optimisation_is_not_active_is_skipped(engine: Engine, golden: Golden) -> None:
    engine.fake(by=from_on(5) | {"python-v4": {"evidence": {"attention": "eager"}}})
    found = bisect(engine)
    (skipped,) = (step for step in found.steps if step.side == "skipped")
    golden(skipped.reason)
    assert [one.name for one in found.suspects] == ["v4", "v5"]


def test_what_was_measured_is_not_launched_again(engine: Engine) -> None:
    engine.fake(by=from_on(3) | {"python-v6": {"fail": "error"}})
    first = bisect(engine)
    launched = len(engine.launches)
    again = bisect(engine)
    assert len(engine.launches) == launched
    assert [replace(step, kept=False) for step in again.steps] == list(first.steps)
    assert all(step.kept for step in again.steps)
    assert again.first_bad == first.first_bad


def test_ctrl_c_tells_what_is_known_and_the_next_goes_on(engine: Engine) -> None:
    fine = from_on(3)
    engine.fake(by=fine | {"python-v2": {"fail": "interrupt"}})
    ended = bisect(engine)
    assert (ended.ended, ended.first_bad) == ("interrupted", None)
    assert [one.name for one in ended.suspects] == ["v1", "v2", "v3", "v4"]
    before = len(engine.launches)
    engine.fake(by=fine)
    found = bisect(engine)
    assert found.first_bad is not None
    assert found.first_bad.name == "v3"
    kept = {step.candidate.name for step in found.steps if step.kept}
    assert kept == {step.candidate.name for step in ended.steps}
    assert len(engine.launches) > before


def test_time_that_is_over_is_no_reason_to_skip(engine: Engine) -> None:
    engine.fake(by=from_on(3))
    found = bisect(engine, replace(ORDER, seconds=0.5))
    assert (found.ended, [step.side for step in found.steps]) == ("time", [None])
    assert engine.launches == []


def test_the_same_bisection_in_another_process_is_refused(engine: Engine, tmp_path: Path) -> None:
    engine.fake(by=from_on(3))
    bisect(engine)
    (folder,) = (tmp_path / "cache/bisections").iterdir()
    with (
        FileLock(folder / "lock", is_singleton=False),
        pytest.raises(CaseFailedError, match="the same bisection runs already, in another process"),
    ):
        bisect(engine)


def test_a_cache_that_cannot_be_written_is_told_and_costs_nothing_else(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LLMPERF_CACHE_DIR", str(tmp_path / "file"))
    engine.fake(by=from_on(3))
    found = bisect(engine)
    assert found.first_bad is not None
    golden(found.notes[-1])


def test_a_kept_file_that_is_broken_is_made_anew(engine: Engine, tmp_path: Path) -> None:
    engine.fake(by=from_on(3))
    bisect(engine)
    for path in (tmp_path / "cache/bisections").rglob("*.json"):
        path.write_text('{"pairs": [[1')
    found = bisect(engine)
    assert found.first_bad is not None
    assert not any(step.kept for step in found.steps)


def test_a_cpus_clock_and_ends_that_are_hardly_apart_are_told(engine: Engine, golden: Golden) -> None:
    engine.fake(by=from_on(3))
    (note,) = bisect(engine).notes
    golden(note)
    engine.fake(by=from_on(3, {"step_seconds": 0.106}))
    small = bisect(engine, replace(ORDER, max_pairs=60), good="v1")
    assert small.yardstick is not None
    golden(small.notes[1])
