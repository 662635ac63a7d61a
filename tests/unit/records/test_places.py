"""The lines of Python that a trace names: kept, merged over ranks, and told where there are more of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.analysis.step_difference import points_to, step_difference
from pytest_llmperf.analysis.waits import host_spends
from pytest_llmperf.judge.exact import StoredTrace, count_checks
from pytest_llmperf.records.trace import MOST_PLACES, SPENT, Trace, merged, new_places
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import Fake, launch_of, trace_of
from tests.golden import Golden

WAITS = "synchronisations_per_step"
SPEC = TrainSpec(model="llama-tiny")


def traced(waits: float = 0, places: Mapping[str, float] | None = None, kind: str = "wait") -> Trace:
    counts: dict[str, dict[str, float]] = {"kernel": {"gemm": 8}}
    if waits:
        counts["wait"] = {"cudaStreamSynchronize": waits}
    return replace(trace_of(counts), places={kind: places} if places else {})


def test_a_trace_without_places_is_stored_as_it_always_was() -> None:
    assert "places" not in traced(1).to_plain()
    assert Trace.from_plain(traced(1).to_plain()) == traced(1)


@given(st.dictionaries(st.text(min_size=1), st.integers(1, 99).map(float), min_size=1, max_size=4))
def test_places_are_read_as_they_were_written(places: dict[str, float]) -> None:
    assert Trace.from_plain(traced(1, places).to_plain()).places == {"wait": places}


def test_of_several_ranks_a_place_has_their_mean() -> None:
    one, other = traced(3, {"a.py:1 x.item()": 2, "b.py:9 y.item()": 1}), traced(1, {"a.py:1 x.item()": 1})
    assert merged([one, other]).places == {"wait": {"a.py:1 x.item()": 1.5, "b.py:9 y.item()": 0.5}}


def test_only_a_place_that_waits_more_often_is_new(golden: Golden) -> None:
    then = traced(3, {"train.py:9 loss.item()": 2, "train.py:50 norm.item()": 1})
    now = traced(33, {"train.py:11 loss.item()": 2, "train.py:52 norm.item()": 1, "train.py:61 seen.item()": 30})
    golden(new_places(WAITS, then, now))
    assert new_places(WAITS, now, then) == []


def test_one_line_written_twice_is_new_once(golden: Golden) -> None:
    then, now = traced(1, {"train.py:9 x.item()": 1}), traced(2, {"train.py:9 x.item()": 1, "train.py:10 x.item()": 1})
    golden(new_places(WAITS, then, now))


def test_an_older_trace_names_no_place_and_then_all_are_named(golden: Golden) -> None:
    golden(new_places(WAITS, traced(30), traced(31, {"train.py:61 x.item()": 30, "lib.py:2": 1})))


def test_a_line_of_two_statements_is_one_reason_of_a_headline() -> None:
    now, told = (
        traced(1, {"train.py:9 loss.backward(); seen += 1": 1}),
        "1 a step at train.py:9 (`loss.backward();seen += 1`)",
    )
    assert new_places(WAITS, traced(), now) == [told]


def test_a_line_of_a_package_is_told_with_the_projects_line_that_led_to_it() -> None:
    place = "train.py:16 trainer.train() => trl/trainer/sft_trainer.py:99 entropy.item()"
    told = "2 a step at train.py:16 (`trainer.train()`) => trl/trainer/sft_trainer.py:99 (`entropy.item()`)"
    assert new_places(WAITS, traced(), traced(2, {place: 2})) == [told]
    assert new_places(WAITS, traced(2, {place.replace("99", "102"): 2}), traced(2, {place: 2})) == []


def test_the_line_that_calls_more_is_the_new_one_or_the_one_that_grew_most(golden: Golden) -> None:
    calls = {"train.py:31 model(x)": 40, "model.py:16 return head(x)": 40, "train.py:33 loss.backward()": 1}
    more = {**calls, "train.py:32 extra = model(x)": 42, "model.py:16 return head(x)": 80}
    then, now, older = (traced(places=places, kind="operator") for places in (calls, more, {}))
    golden(new_places("operators_per_step", then, now))
    assert new_places("operators_per_step", older, now) == []


def test_of_calls_that_were_left_out_nothing_is_new() -> None:
    kept = {f"train.py:{number} f{number}(x)": 5 for number in range(MOST_PLACES)}
    then = traced(places=kept, kind="operator")
    assert new_places("operators_per_step", then, traced(places={"train.py:9 g(x)": 5}, kind="operator")) == []


def on_a_host(step: float, **spent: float) -> Trace:
    """Steps of so many seconds, half of which compute but for what is spent asleep."""
    lines = {"asleep": "data.py:7 time.sleep(0.05)", "model": "train.py:31 model(x)"}
    busy = (step - spent.get("asleep", 0.0)) / 2
    places = {lines[name]: seconds for name, seconds in spent.items()}
    return replace(traced(places=places, kind=SPENT), step_seconds=step, busy_seconds=busy)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (on_a_host(0.1, model=0.1), on_a_host(0.15, model=0.1, asleep=0.05)),
        (on_a_host(0.15, model=0.1, asleep=0.05), on_a_host(0.3, model=0.1, asleep=0.2)),
        # All takes twice as long.
        (on_a_host(0.1, model=0.1), on_a_host(0.2, model=0.2)),
        # Less than a quarter.
        (on_a_host(0.1, model=0.1), on_a_host(0.11, model=0.1, asleep=0.01)),
        # What is computed takes longer.
        (on_a_host(0.1, model=0.1), replace(on_a_host(0.2, model=0.2), busy_seconds=0.15)),
        # An older trace.
        (on_a_host(0.1), on_a_host(0.15, model=0.1, asleep=0.05)),
    ],
    ids=["asleep", "longer asleep", "slower", "too little", "more computed", "older"],
)
def test_a_host_that_waits_is_told_with_its_line(then: Trace, now: Trace, golden: Golden) -> None:
    golden(list(host_spends(then, now)))


def test_a_check_that_failed_names_the_line_that_waits(golden: Golden) -> None:
    stored = StoredTrace.of([launch_of(SPEC, Fake(trace={"kernel": {"gemm": 8}}))])
    now = replace(launch_of(SPEC, Fake()), trace=traced(30, {"train.py:61 loss.item()": 30}))
    check = next(check for check in count_checks([now], stored) if check.metric == WAITS)
    assert check.verdict == "regressed"
    golden(check.detail)


def test_fewer_waits_name_no_line(golden: Golden) -> None:
    before = replace(launch_of(SPEC, Fake()), trace=traced(30, {"train.py:61 loss.item()": 30}))
    now = replace(launch_of(SPEC, Fake()), trace=traced(1, {"train.py:70 x.item()": 1}))
    check = next(check for check in count_checks([now], StoredTrace.of([before])) if check.metric == WAITS)
    golden(check.detail)


def test_a_diagnosis_names_the_line_that_waits() -> None:
    difference = step_difference(traced(), traced(30, {"train.py:61 loss.item()": 30}))
    told = "waits of the host: cudaStreamSynchronize 30 new, 30 a step at train.py:61 (`loss.item()`)"
    assert told in points_to(difference)
