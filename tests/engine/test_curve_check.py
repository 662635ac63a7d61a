"""Loss curves of cases: when they are trained, judged, recorded and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.judge.baseline import LOSS_CURVES, CurveBaseline
from pytest_llmperf.judge.store import Store
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.report.results_json import document
from pytest_llmperf.run.case import CaseTerms
from pytest_llmperf.run.findings import CaseFailedError, Concluded, DidNotTrainError
from pytest_llmperf.support import codec
from tests import text_package
from tests.engine.conftest import SPEC as RANDOM
from tests.engine.conftest import Engine
from tests.golden import Golden

SPEC = replace(RANDOM, data="text", min_steps=20)
ASKED = CaseTerms(loss_curve=5)

#: What each seed ends at, where nothing is wrong.
LOSSES = {42: 6.0, 43: 6.05, 44: 5.95, 45: 6.02, 46: 5.98}


@pytest.fixture(autouse=True)
def _texts_can_be_read(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    text_package.offer(tmp_path_factory.mktemp("packages"), monkeypatch)


def fake(engine: Engine, losses: dict[int, float] | float = 0.0, **values: Any) -> None:
    """Launches of each seed lose so much from now on, or so much more than ``LOSSES``."""
    told = losses if isinstance(losses, dict) else {seed: loss + losses for seed, loss in LOSSES.items()}
    by = {f"seed{seed}": {"loss": loss} for seed, loss in told.items() if seed != 42}
    engine.fake(loss=told[42], by=by, **values)


def check(engine: Engine, terms: CaseTerms = ASKED, **settings: Any) -> Concluded:
    return engine.run(terms, **settings).check(SPEC)


@pytest.fixture
def stored(engine: Engine) -> Engine:
    """With a baseline and a loss curve of five seeds."""
    fake(engine)
    concluded = check(engine, update="all", reason="start")
    assert "recorded loss curve of 5 seeds, 42 to 46, of 20 steps: " in concluded.result.updated
    assert [name.count("seed") for name in engine.launches] == [0, 1, 1, 1, 1]
    assert engine.heard.counted == [(1, 1), (2, 5), (3, 5), (4, 5), (5, 5)]
    assert not concluded.fails
    (engine.path / "launches.txt").unlink()
    return engine


def word(result: CaseResult) -> str:
    return result.loss_curve.verdict if result.loss_curve else ""


def test_one_launch_tells_that_all_is_as_it_was(stored: Engine, golden: Golden) -> None:
    concluded = check(stored)
    assert (concluded.result.verdict, word(concluded.result)) == ("pass", "same")
    golden(concluded.result.notes)
    assert len(stored.launches) == 1


def test_a_little_is_nothing(stored: Engine) -> None:
    fake(stored, 0.005)
    result = check(stored).result
    assert (result.verdict, word(result), len(stored.launches)) == ("pass", "same", 1)


def test_what_one_seed_does_not_decide_the_next_ones_do(stored: Engine) -> None:
    fake(stored, {**LOSSES, 42: 6.03})
    result = check(stored).result
    # A pair that is a little apart, and four that are not.
    assert (result.verdict, word(result), len(stored.launches)) == ("pass", "same", 5)
    assert result.loss_curve is not None
    assert result.loss_curve.seeds == tuple(LOSSES)


def test_what_all_seeds_leave_open_is_inconclusive(stored: Engine, golden: Golden) -> None:
    fake(stored, {42: 6.09, 43: 5.91, 44: 6.05, 45: 5.95, 46: 6.1})
    concluded = check(stored)
    assert (concluded.result.verdict, concluded.fails) == ("inconclusive", False)
    golden(concluded.result.reason)
    assert check(stored, strict=True).fails


@pytest.mark.parametrize(("more", "expected", "launches"), [(0.09, "worse", 5), (-0.09, "faster", 5), (3, "worse", 2)])
def test_other_learning_is_invalid_in_either_direction(
    stored: Engine, more: float, expected: str, launches: int, golden: Golden
) -> None:
    fake(stored, more)
    concluded = check(stored)
    assert (concluded.result.verdict, concluded.fails) == ("invalid", True)
    assert (word(concluded.result), len(stored.launches)) == (expected, launches)
    reason = concluded.result.reason
    golden(reason)
    assert f"({launches} of 5 seeds)" in reason
    assert "\n" not in reason


def test_other_learning_is_recorded_with_a_reason_alone(stored: Engine, golden: Golden) -> None:
    fake(stored, 0.09)
    refused = check(stored, update="all")
    assert refused.fails
    golden(refused.refused)
    accepted = check(stored, update="all", reason="another schedule")
    assert not accepted.fails
    assert "recorded loss curve" in accepted.result.updated
    # The reason may have been meant of something else.
    golden(accepted.result.updated)
    assert word(check(stored).result) == "same"


def test_a_stored_curve_is_kept_where_nothing_asks_for_another(stored: Engine, golden: Golden) -> None:
    result = check(stored, update="all").result
    assert "loss curve" not in result.updated
    assert (word(result), len(stored.launches)) == ("same", 1)
    fewer = check(stored, CaseTerms(loss_curve=3), update="all").result
    golden(fewer.updated)


def test_a_case_that_has_none_is_new(engine: Engine, golden: Golden) -> None:
    fake(engine)
    assert engine.run(update="all", reason="start").check(SPEC).result.updated
    concluded = check(engine)
    assert (concluded.result.verdict, concluded.fails) == ("new", True)
    golden(concluded.result.reason)
    (engine.path / "launches.txt").unlink()
    # Its baseline stays as it is.
    recorded = check(engine, update="new")
    assert recorded.result.updated.startswith("recorded loss curve")
    assert len(engine.launches) == 5
    assert word(check(engine).result) == "same"


def test_a_case_that_regressed_records_no_curve_unseen(engine: Engine, golden: Golden) -> None:
    fake(engine)
    engine.run(update="all", reason="start").check(SPEC)
    fake(engine, reserved_bytes=2**32)
    concluded = check(engine, update="new")
    assert (concluded.result.verdict, concluded.fails) == ("regressed", True)
    golden(concluded.refused)


def test_what_is_invalid_anyway_trains_no_further_seed(stored: Engine) -> None:
    fake(stored, 0.09, evidence={"attention": "eager"})
    result = check(stored).result
    assert (result.verdict, result.loss_curve, len(stored.launches)) == ("invalid", None, 1)


def test_a_seed_that_does_not_train_is_named(stored: Engine) -> None:
    fake(stored, 0.09)
    values = json.loads((stored.path / "fake.json").read_text())
    values["by"]["seed43"] = {"fail": "error"}
    (stored.path / "fake.json").write_text(json.dumps(values))
    with pytest.raises(DidNotTrainError, match=r"seed43-gpus1: .*it broke"):
        check(stored)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (RANDOM, 'random tokens have nothing to learn, a loss curve takes data="text": train on one, or ask for no'),
        (replace(SPEC, min_steps=16), "a launch may end after min_steps=16 of steps=20"),
        (replace(SPEC, steps=12, min_steps=12), "steps=12 are too few for a loss curve, expected 16 or more"),
    ],
)
def test_what_has_no_curve_is_refused_before_a_launch(engine: Engine, spec: Any, said: str) -> None:
    with pytest.raises(CaseFailedError, match=said.replace("(", r"\(")):
        engine.run(ASKED).check(spec)
    assert engine.launches == []


def test_seeds_beyond_the_last_one_are_refused_before_a_launch(engine: Engine, golden: Golden) -> None:
    with pytest.raises(CaseFailedError) as raised:
        engine.run(ASKED).check(replace(SPEC, seed=2**32 - 4))
    golden(raised)
    assert engine.launches == []


def test_a_whole_run_means_the_cases_with_a_text(engine: Engine) -> None:
    fake(engine)
    assert engine.check(RANDOM, loss_curve=True, update="new").result.loss_curve is None
    assert word(engine.check(SPEC, loss_curve=True, update="new").result) == "recorded"


def test_a_file_that_cannot_serve_costs_no_launch(stored: Engine) -> None:
    path = Store(stored.path / "baselines", CurveBaseline).path(LOSS_CURVES, SPEC)
    for text, said in (("{", "not JSON"), ('{"schema": 1}', "it has no 'id'")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(CaseFailedError, match=said):
            check(stored)
    assert stored.launches == []


def test_curves_of_other_steps_are_no_reference(stored: Engine, golden: Golden) -> None:
    longer = replace(SPEC, steps=24, min_steps=24)
    with pytest.raises(CaseFailedError) as raised:
        stored.run(ASKED).check(longer)
    golden(raised)
    assert stored.launches == []
    assert "of 24 steps" in stored.run(ASKED, update="all").check(longer).result.updated


def test_a_dry_run_counts_the_seeds_that_are_recorded(stored: Engine) -> None:
    for reason, launches in (("", 1), ("why", 5)):
        assert check(stored, dry_run=True, update="all", reason=reason).result.verdict == "planned"
        assert [planned.launches for planned in stored.findings.planned] == [launches]
    assert stored.launches == []


def test_a_test_of_the_same_spec_trains_no_seed_again(stored: Engine) -> None:
    fake(stored, {**LOSSES, 42: 6.03})
    run = stored.run(ASKED)
    first, second = run.check(SPEC), run.check(SPEC)
    assert (word(first.result), word(second.result), len(stored.launches)) == ("same", "same", 5)


def test_it_crosses_processes_and_is_in_the_json(stored: Engine) -> None:
    result = check(stored).result
    assert codec.read(CaseResult, json.loads(json.dumps(codec.plain(result)))) == result
    told = document({}, [result])["results"][0]["loss_curve"]
    assert (told["verdict"], told["seeds"], len(told["parts"])) == ("same", [42], 4)


def test_other_environments_have_no_curve_to_judge(stored: Engine, golden: Golden) -> None:
    result = check(stored, against="python").result
    assert result.loss_curve is None
    golden(result.notes)


def test_other_searches_do_not_see_the_files(stored: Engine) -> None:
    paths = {path.relative_to(stored.path / "baselines").parts[0] for path in stored.baselines}
    assert "loss-curves" in paths
    assert len(paths) == 2
    assert Path(stored.path / "baselines" / "loss-curves").is_dir()
