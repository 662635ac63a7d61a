"""Loops that nobody wrote for us, watched by the real hooks: their steps, losses and tokens as they know them."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

from tests.golden import Golden
from tests.worker.scripts import Scripts, Seen

pytestmark = pytest.mark.torchrun

STEPS = 12

NAMES = (
    "plain accumulation evaluating failing scaler lbfgs gan gan5 muon rare compiled compiled_layers compiled_in_place "
    "compiled_function compiled_step compiled_optimizer in_backward checkpointed experts by_functions forking profiled "
    "many_passes short fetching reference ahead positions prepared halved"
).split()
# Each with what its spec says.
LOOPS: dict[str, dict[str, Any]] = {
    **{name: {} for name in NAMES},
    "twice": {"step": 2},
    "to_the_end": {"end": "script"},
}
# These compile for two seconds each.
RARE = ("compiled_step", "compiled_optimizer")
OFTEN = [name for name in LOOPS if name not in RARE]
EACH = [*OFTEN, *(pytest.param(name, marks=pytest.mark.wide) for name in RARE)]
FAILING: dict[str, tuple[str, dict[str, Any]]] = {
    "no optimizer": ("by_hand", {}),
    "too short": ("too_short", {}),
    "no such optimizer": ("plain", {"step": "Lion"}),
    "the first of two trainings": ("trainings", {"steps": 45}),
    "an error": ("raising", {}),
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """All of them, in forks of one process: torch is imported once, and so is what compiles."""
    scripts = looped(tmp_path_factory)
    found = {name: scripts.add(name, **LOOPS[name]) for name in OFTEN}
    found |= {name: scripts.add(kind, **words) for name, (kind, words) in FAILING.items()}
    found["cut"] = scripts.add("trainings", steps=38)
    seeds: list[dict[str, Any]] = [{}, {"seed": 7}, {"seed": 7}, {"seed": 8}]
    found |= {f"seeded {number}": scripts.add("plain", **words) for number, words in enumerate(seeds)}
    return run(scripts, found)


@pytest.fixture(scope="module")
def rarely_seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    scripts = looped(tmp_path_factory)
    return run(scripts, {name: scripts.add(name, **LOOPS[name]) for name in RARE})


def looped(tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    return Scripts(tmp_path_factory.mktemp("loops"), "loops.py", ("torch._inductor.compile_fx",))


def run(scripts: Scripts, found: dict[str, Seen]) -> dict[str, Seen]:
    scripts.run()
    # On a loud machine each step of one may wait between the hook and the script's own clock.
    for _ in range(4):
        again = [name for name in found if name in LOOPS and found[name].is_late()]
        found |= {name: scripts.add(name, **LOOPS[name]) for name in again}
        if again:
            scripts.run()
    return found


@pytest.fixture
def it(name: str, request: pytest.FixtureRequest) -> Seen:
    """The loop of this name."""
    found: dict[str, Seen] = request.getfixturevalue("rarely_seen" if name in RARE else "seen")
    return found[name]


@pytest.mark.parametrize("name", EACH)
def test_steps_are_those_of_the_script(it: Seen) -> None:
    record = it.share.trained.record
    assert len(record.step_seconds) == STEPS
    assert not it.is_late(), it.seconds_apart
    assert record.step_seconds[0] > 0.02  # from the process's begin


@pytest.mark.parametrize("name", EACH)
def test_losses_and_tokens_are_those_of_the_script(it: Seen) -> None:
    own, share = it.own[:STEPS], it.share
    for index, (_, loss, _) in enumerate(own if share.trained.losses else ()):
        assert loss is None or share.trained.losses[index] == pytest.approx(loss, abs=1e-6), index
    if share.trained.evidence["tokens"] == "counted" and own[0][2]:
        tokens = share.trained.record.step_tokens or (share.trained.record.tokens_per_step,) * STEPS
        assert list(tokens[2:]) == [tokens for *_, tokens in own[2:]]


def test_what_is_not_known_is_said(seen: dict[str, Seen]) -> None:
    said = {name: {key: seen[name].share.trained.evidence.get(key) for key in ("tokens", "losses")} for name in OFTEN}
    no_tokens = {name for name, words in said.items() if words["tokens"] == "unknown"}
    assert no_tokens == {"lbfgs", "gan", "gan5", "compiled_function", "many_passes"}
    assert {name for name, words in said.items() if words["losses"] == "unknown"} == {"by_functions", "many_passes"}
    assert seen["scaler"].share.trained.evidence["skipped_steps"] == [3, 4, 9]


def test_how_steps_were_counted_and_what_was_in_the_way_is_a_remark(seen: dict[str, Seen], golden: Golden) -> None:
    remarks = {name: seen[name].share.trained.evidence.get("remarks", []) for name in OFTEN}
    told = ("rare", "gan", "profiled", "reference")
    golden([line for name in told for line in remarks[name]])
    assert not any(remarks[name] for name in OFTEN if name not in (*told, "gan5"))


@pytest.mark.wide
def test_of_a_step_that_is_compiled_whole_no_tokens_are_known(
    rarely_seen: dict[str, Seen],
) -> None:
    told = {name: each.share.trained.evidence for name, each in rarely_seen.items()}
    assert {name: each["tokens"] for name, each in told.items()} == {
        "compiled_step": "unknown",
        "compiled_optimizer": "counted",
    }
    assert not any(each.get("losses") or each.get("remarks") for each in told.values())


def test_a_traced_step_is_of_the_script_alone(seen: dict[str, Seen]) -> None:
    for name in ("plain", "scaler", "twice"):
        trace = seen[name].share.trace
        assert trace.steps == 3, trace.none
    # Steps that are unlike are traced as their mean.
    counts = {row.name: row.count for row in seen["experts"].share.trace.rows}
    assert counts["aten::addmm"] == 5  # of 3, 5 and 7
    assert "own profiler" in seen["profiled"].share.trace.none
    assert "the training ended before" in seen["short"].share.trace.none


def test_waits_for_data_are_the_host_s_time_inside_of_loaders(seen: dict[str, Seen]) -> None:
    trace, seconds = seen["fetching"].share.trace, seen["fetching"].share.trained.record.step_seconds
    assert 0.01 < trace.data_seconds < median(seconds[2:])
    assert "aten::stack" in {row.name for row in trace.rows}, "what a loader does is counted as before"
    assert not seen["plain"].share.trace.data_seconds
    assert seen["ahead"].share.trace.data_seconds
    assert "aten::set_" not in {row.name for row in seen["ahead"].share.trace.rows}, "how many had come is chance"


def test_another_training_that_begins_while_steps_are_traced_takes_nothing_from_those_that_were_timed(
    seen: dict[str, Seen],
) -> None:
    share = seen["cut"].share
    assert len(share.trained.record.step_seconds) == 38
    assert "the training ended before" in share.trace.none
    assert seen["cut"].ended == "parked"


def test_a_script_that_goes_on_ends_with_its_own_code(seen: dict[str, Seen]) -> None:
    assert seen["to_the_end"].ended == 3
    assert len(seen["to_the_end"].own) == 40
    assert seen["plain"].ended == "parked"


@pytest.mark.parametrize("name", FAILING)
def test_why_nothing_was_measured_is_one_line(seen: dict[str, Seen], name: str, golden: Golden) -> None:
    assert not list(seen[name].folder.glob("share-*.json"))
    golden(seen[name].message)


def test_a_seed_makes_a_script_repeat_that_does_not_by_itself(seen: dict[str, Seen]) -> None:
    found = [seen[f"seeded {number}"].share.trained.losses for number in range(4)]
    assert len(set(found)) == 3  # torch has a seed of its own where nobody seeds
    assert found[1] == found[2]
