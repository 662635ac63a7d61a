"""Baselines: their JSON, what is accepted, and what an update says."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.judge.acceptance import creep, describe
from pytest_llmperf.judge.baseline import Baseline, CapacityBaseline, size_of
from pytest_llmperf.judge.policy import Policy, Rule
from pytest_llmperf.judge.stats import Experience
from pytest_llmperf.judge.store import BaselineError, parse, text_of
from pytest_llmperf.judge.validity import circumstances
from pytest_llmperf.judge.verdict import judge
from pytest_llmperf.records.calibration import Calibration
from pytest_llmperf.records.launch import Environment, Launch
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.examples import examples
from tests.fakes import Fake, launch_of
from tests.golden import Golden
from tests.shelf import accept

SPEC = TrainSpec(model="llama-tiny", sequence_length=64, steps=12, warmup_steps=4)
REPOSITORY = Path(__file__).parents[3]


def launch(step_seconds: float = 0.1, canary: float = 0.0, **fake: Any) -> Launch:
    made = launch_of(SPEC, Fake(step_seconds=step_seconds, **fake))
    return replace(made, canary={"matmul_flops": canary}) if canary else made


def accepted(
    old: Baseline | None, *launches: Launch, reason: str = "", rule: Rule | None = None, **other: Any
) -> Baseline:
    judgement = judge(launches, old, replace(Policy.for_gpu(), rule=rule or Rule()))
    values: dict[str, Any] = {
        "verdict": judgement.verdict,
        "checks": judgement.checks,
        "reason": reason,
        "recorded_at": "2026-01-01T00:00:00Z",
        "recorded_by": "test_it.py::test_it[1,2]",
        **other,
    }
    return accept(old, judged=values.pop("judged", old), spec=SPEC, machine="m", launches=launches, **values)


BASELINE = accepted(None, launch())


def calibration(day: str) -> Calibration:
    return Calibration(made_at=f"{day}T00:00:00Z", seconds={"copy": 0.0005}, versions={"torch": "2.0"})


def calibrated(launch: Launch, made: Calibration) -> Launch:
    return replace(launch, ranks=tuple(replace(rank, calibration=made) for rank in launch.ranks))


class TestJson:
    def test_it_is_sorted_and_ends_with_a_newline(self) -> None:
        text = text_of(BASELINE)
        document = json.loads(text)
        assert text.endswith("}\n")
        assert list(document) == sorted(document)
        assert document["schema"] == 1

    def test_it_does_not_say_where_the_time_of_a_launch_went_that_decides_nothing(self) -> None:
        timed = replace(BASELINE, launches=(replace(launch(), phases={"steps": 1.5, "end": 0.5}),))
        assert text_of(timed) == text_of(replace(BASELINE, launches=(launch(),)))

    def test_numbers_of_a_launch_are_on_one_line(self) -> None:
        text = text_of(accepted(None, launch(1 / 3)))
        (line,) = (line for line in text.splitlines() if '"step_seconds": [' in line)
        assert line.strip() == '"step_seconds": [1.66667' + ", 0.333333" * 11 + "],"

    def test_equal_environments_are_written_once(self) -> None:
        both = accepted(None, launch(), launch(), launch(versions={"torch": "3.0"}))
        document = json.loads(text_of(both))
        assert len(document["environments"]) == 2
        keys = [entry["environment"] for entry in document["launches"]]
        assert keys[0] == keys[1] != keys[2]
        assert all(len(key) == 8 for key in keys)

    def test_a_calibration_is_written_once_and_read_back(self) -> None:
        mine, others = calibration("2026-01-01"), calibration("2026-01-02")
        launches = [calibrated(launch(), mine), calibrated(launch(0.101), mine), calibrated(launch(), others)]
        text = text_of(accepted(None, *launches, launch()))
        document = json.loads(text)
        assert len(document["calibrations"]) == 2
        keys = [record["ranks"][0].get("calibration") for record in document["launches"]]
        assert keys[0] == keys[1] != keys[2]
        assert keys[3] is None
        read = parse(Baseline, text, "f")
        assert [each.ranks[0].calibration for each in read.launches] == [mine, mine, others, None]
        assert text_of(read) == text

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda document: document.pop("calibrations"), "expected one of none"),
            (lambda document: document.update(calibrations={}), "expected one of none"),
            (lambda document: document.update(calibrations=[]), "calibrations is []"),
            (lambda document: document["launches"][0]["ranks"][0].update(calibration=7), "calibration is 7"),
            (
                lambda document: next(iter(document["calibrations"].values()))["seconds"].update(copy=0.0),
                "a calibration has 'copy' at 0.0 s",
            ),
        ],
    )
    def test_a_calibration_that_is_none_is_refused(self, change: Callable[[Any], object], said: str) -> None:
        document = json.loads(text_of(accepted(None, calibrated(launch(), calibration("2026-01-01")))))
        change(document)
        with pytest.raises(BaselineError, match=re.escape(said)):
            parse(Baseline, json.dumps(document), "f")

    def test_more_launches_only_add_lines_to_a_diff(self) -> None:
        before = text_of(BASELINE).splitlines()
        after = text_of(accepted(BASELINE, launch(0.101))).splitlines()
        added = len(after) - len(before)
        # A list's last entry gains a comma: nothing else of what was there changes.
        gone = [line for line in before if line not in after and line + "," not in after]
        assert (added > 0, gone) == (True, [])

    @pytest.mark.parametrize("path", sorted((REPOSITORY / "baselines").glob("*/*/*.json")), ids=lambda path: path.stem)
    def test_stored_ones_are_written_back_as_they_are(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        assert text_of(parse(Baseline, text, str(path))) == text

    @pytest.mark.parametrize(
        "path", sorted((REPOSITORY / "baselines").glob("*/*/capacity/*.json")), ids=lambda path: path.stem
    )
    def test_stored_capacities_are_written_back_as_they_are(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        assert text_of(parse(CapacityBaseline, text, str(path))) == text

    def test_bytes_that_were_stored_as_rounded_floats_are_still_read(self) -> None:
        document = json.loads(text_of(BASELINE))
        record, exact = document["launches"][0], 56_449_000_512
        record["ranks"][0]["peak_reserved_bytes"] = record["ranks"][0]["peak_allocated_bytes"] = exact
        for entry in (document["anchor"], *document["history"]):
            entry["metrics"] |= dict.fromkeys(("peak_reserved_bytes", "peak_allocated_bytes"), 56449000000.0)
        assert parse(Baseline, json.dumps(document), "f").anchor.metrics["peak_reserved_bytes"] == 56_449_000_000

    def test_bytes_keep_every_digit_and_are_whole(self) -> None:
        text = text_of(accepted(None, launch(reserved_bytes=51_006_724_609)))
        bytes_of = re.findall(r'"peak_reserved_bytes": (.*?),?\n', text)
        assert bytes_of == ["51006724609"] * 3  # the anchor, the history and the launch
        assert parse(Baseline, text, "f").anchor.metrics["peak_reserved_bytes"] == 51_006_724_609

    @given(
        times=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=3),
        losses=st.lists(st.floats(-1e30, 1e30), min_size=12, max_size=12),
        words=st.lists(st.text(), max_size=3),
        recorded_by=st.text(),
        note=st.sampled_from(["[1,2]", "[ 1 ]", "[\n1,\n2\n]", '"[\\n1]', "[-1,-e]"]),
    )
    def test_what_is_written_is_read_back(
        self, times: list[float], losses: list[float], words: list[str], recorded_by: str, note: str
    ) -> None:
        environment = Environment(
            gpu="g", driver=note, versions=dict.fromkeys(words, note), variables={note: note}, platform="p"
        )
        launches = [replace(launch(time), losses=tuple(losses), environment=environment) for time in times]
        written = text_of(accepted(None, *launches, reason=note, recorded_by=recorded_by))
        read = parse(Baseline, written, "f")
        assert text_of(read) == written
        assert read.recorded_by == recorded_by
        assert read.anchor.reason == note
        for old, new in zip(launches, read.launches, strict=True):
            assert new.step_seconds == pytest.approx(old.step_seconds, rel=1e-5)
            assert new.losses == pytest.approx(old.losses, rel=1e-5)
            assert (new.environment, new.evidence, new.digest) == (old.environment, old.evidence, old.digest)

    @given(st.lists(st.floats(-1e12, -1e-12), min_size=30, max_size=30))
    def test_negative_numbers_are_compact_too(self, losses: list[float]) -> None:
        record = replace(launch(), losses=tuple(losses))
        text = text_of(replace(BASELINE, launches=(record,)))
        assert sum('"losses": [-' in line and line.endswith("],") for line in text.splitlines()) == 1

    def test_a_figure_that_is_none_is_never_written(self, golden: Golden) -> None:
        with pytest.raises(BaselineError) as raised:
            text_of(replace(BASELINE, launches=(replace(launch(), wall_seconds=math.nan),)))
        golden(raised)


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.pop(name)


def setting(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update({name: value})


def broken_launch(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["launches"][0].update(values)


ENTRY = {"metrics": {}, "reason": "", "recorded_at": "", "launches": 1}


#: What somebody, or a merge, may leave in the place of a value; the last one removes it.
WRONG: tuple[Any, ...] = (
    *(None, True, False, "", "2", "fast\n", "nan", [], {}, [1], [None], {"a": None}, {"a": 1}, ["x", "y"]),
    *(0, -1, 1, 7, 0.0, -0.5, 1e-300, 1e300, -1e300, 10**18, -(10**18), 10**19, 10**400, -(10**400)),
    *(float("nan"), float("inf"), ...),
)


def mutated(document: dict[str, Any], draw: Callable[[st.SearchStrategy[Any]], Any]) -> str:
    for _ in range(draw(st.integers(1, 3))):
        container, key = document, draw(st.sampled_from(sorted(document)))
        while isinstance(container[key], (dict, list)) and container[key] and draw(st.integers(0, 3)):
            container = container[key]
            keys = sorted(container) if isinstance(container, dict) else range(len(container))
            key = draw(st.sampled_from(keys))
        value = draw(st.sampled_from(WRONG))
        if value is ...:
            del container[key]
        else:
            container[key] = copy.deepcopy(value)
    return json.dumps(document)


def used(baseline: Baseline) -> None:
    """Everything that a run does with a baseline of its case, and with those of others."""
    candidates = [launch(0.11, canary=1.0), launch(0.1, canary=1.0)]
    experience = Experience.of([baseline.launches] * 6, Policy.for_gpu().noise)
    judgement = judge(candidates, baseline, replace(Policy.for_gpu(), noise=experience.noise))
    judge(candidates, baseline, Policy.for_cpu())
    for candidate in candidates:
        circumstances(candidate, 0.02, experience)
        baseline.launches[-1].differences(candidate)
    creep(baseline, judgement.checks, candidates, Policy.for_gpu().noise)
    size_of(baseline)
    new = accepted(baseline, *candidates, reason="why")
    describe(baseline, new)
    with suppress(BaselineError):  # a figure that is not finite
        parse(Baseline, text_of(new), "some/file.json")


class TestBrokenFiles:
    @examples(200)
    @given(st.data())
    def test_any_change_is_refused_in_one_line_or_can_be_judged_against(self, data: st.DataObject) -> None:
        document = json.loads(text_of(accepted(BASELINE, launch(canary=1.0), launch(canary=1.2), launch())))
        text = mutated(document, data.draw)
        try:
            baseline = parse(Baseline, text, "some/file.json")
        except BaselineError:
            refused(text)
        else:
            used(baseline)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "the file is empty"),
            (" \n", "the file is empty"),
            (text_of(BASELINE)[:300], "not JSON, perhaps truncated"),
            (
                "<<<<<<< HEAD\n" + text_of(BASELINE),
                "in a merge conflict; take one side, or ",
            ),
            ("[" * 100_000, "not JSON"),
            ("[]", 'no "schema"'),
            ("null", 'no "schema"'),
            ("{}", 'no "schema"'),
            ('{"schema": "1"}', "unknown schema '1', expected 1"),
            (text_of(BASELINE).replace("0.1, 0.1]", "0.1, NaN]"), "NaN is no figure"),
            (text_of(BASELINE).replace("0.1, 0.1]", "0.1, 1e999]"), "1e999 is no figure"),
        ],
        ids=lambda text: repr(text[:12]),
    )
    def test_text_that_is_none(self, text: str, said: str) -> None:
        assert said in refused(text)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            *((without(name), f"it has no {name!r}") for name in json.loads(text_of(BASELINE)) if name != "schema"),
            (setting("history", []), "no history"),
            (setting("launches", []), "no launch"),
            (setting("launches", {}), "launches is {}, expected a list"),
            (setting("launches", 7), "not a baseline"),
            (setting("spec", None), "not a baseline"),
            (setting("spec", replace(SPEC, micro_batch_size=4).to_dict()), "is of other settings than its digest"),
            (setting("environments", {}), "expected one of none"),
            (setting("digest", "0" * 16), "other settings"),
            (setting("anchor", {"metrics": {}}), "not a baseline"),
            (setting("anchor", {"metrics": None, "reason": "", "recorded_at": "", "launches": 1}), "not a baseline"),
            (
                setting("anchor", {"metrics": {"x": "y"}, "reason": "", "recorded_at": "", "launches": 1}),
                "metrics 'x' is",
            ),
            (broken_launch(losses=[]), "no loss was recorded"),
            (broken_launch(ranks=[]), "not a baseline"),
            (broken_launch(surprise=1), "surprise"),
            (broken_launch(started_at=5), "started_at is 5, expected text"),
            (broken_launch(evidence=[]), "evidence is [], expected an object"),
            (broken_launch(warmup_steps="3"), "not a baseline"),
            (broken_launch(warmup_steps=-1), "12 steps, -1 of them warm-up"),
            (broken_launch(wall_seconds=True), "wall_seconds is true"),
            (broken_launch(losses=[10**400] * 12), "not a baseline"),
            (setting("anchor", {**ENTRY, "recorded_at": 5}), "recorded_at is 5, expected text"),
            (setting("anchor", {**ENTRY, "launches": "2"}), 'launches is "2", expected a whole number'),
            (setting("anchor", {**ENTRY, "metrics": {"x": None}}), "metrics 'x' is null, expected a number"),
            (setting("anchor", [ENTRY]), "anchor is [{"),
            (setting("anchor", {**ENTRY, "reasons": ""}), "has 'reasons', which is unknown (did you mean 'reason'?)"),
            (setting("id", None), "id is null, expected text"),
            (setting("history", {}), "history is {}, expected a list"),
            (setting("environments", ["x"]), 'environments is ["x"], expected an object'),
            (broken_launch(canary={"matmul": None}), "canary 'matmul' is null, expected a number"),
            (broken_launch(canary={"matmul": "fast"}), "canary 'matmul' is \"fast\", expected a number"),
            (broken_launch(ranks=[None]), "ranks[0] is null, expected an object"),
            (broken_launch(ranks=[{}]), "ranks[0] has no 'rank'"),
            (broken_launch(parameters=10**400), "which is no figure"),
            (broken_launch(environment=["a"]), "environment is ['a'], expected one of "),
            (broken_launch(health={"clock_reasons": {"a": "b"}}), "clock_reasons 'a' is \"b\", expected a number"),
        ],
    )
    def test_a_document_that_is_none(self, change: Callable[[dict[str, Any]], None], said: str) -> None:
        document = json.loads(text_of(BASELINE))
        change(document)
        assert said in refused(json.dumps(document))

    @pytest.mark.parametrize("topic", ["torch", "config", "sources"])
    def test_a_setup_of_another_shape_is_refused(self, topic: str, golden: Golden) -> None:
        document = json.loads(text_of(BASELINE))
        document["setups"] = {"x": {topic: 3}}
        document["launches"][0]["evidence"]["setup"] = "x"
        golden(refused(json.dumps(document)))

    @pytest.mark.parametrize("which", [0, 1, 2])
    @pytest.mark.parametrize("factor", [0.98, 1.02])
    def test_raw_values_that_were_edited_are_noticed(self, which: int, factor: float, golden: Golden) -> None:
        stored = accepted(accepted(accepted(None, launch()), launch(0.101)), launch(0.099))
        for name in ("step_seconds", "peak_reserved_bytes"):
            document = json.loads(text_of(stored))
            rank = document["launches"][which]["ranks"][0]
            steps = [step * factor for step in rank["step_seconds"]]
            rank[name] = steps if name == "step_seconds" else int(rank[name] * factor)
            said = refused(json.dumps(document))
            golden(said)

    @pytest.mark.parametrize("factor", [0.98, 0.999, 1.02])
    @pytest.mark.parametrize(
        "name",
        [
            *("tokens_per_second_per_gpu", "tokens_per_second", "step_seconds", "first_step_seconds"),
            *("peak_reserved_bytes", "peak_allocated_bytes", "final_loss"),
        ],
    )
    @pytest.mark.parametrize("place", ["the first and its anchor", "the first", "the anchor", "the last"])
    def test_a_figure_that_was_edited_where_it_was_accepted_is_noticed(
        self, name: str, factor: float, place: str
    ) -> None:
        document = json.loads(text_of(accepted(accepted(None, launch()), launch(0.101))))
        first, last = document["history"]
        entries = {"the first": [first], "the anchor": [document["anchor"]], "the last": [last]}
        for entry in entries.get(place, [first, document["anchor"]]):
            entry["metrics"][name] *= factor
        assert name in refused(json.dumps(document))

    def test_rates_and_times_that_were_edited_together_are_held_against_the_launches(self, golden: Golden) -> None:
        document = json.loads(text_of(accepted(None, launch(), launch(0.101))))
        for entry in (document["anchor"], *document["history"]):
            entry["metrics"]["step_seconds"] *= 1.02
            for name in ("tokens_per_second", "tokens_per_second_per_gpu"):
                entry["metrics"][name] /= 1.02
        golden(refused(json.dumps(document)))

    @pytest.mark.parametrize("name", ["tokens_per_second_per_gpu", "tokens_per_second", "step_seconds"])
    def test_an_edited_rate_is_noticed_where_its_launches_are_gone(self, name: str, golden: Golden) -> None:
        moved = accepted(BASELINE, launch(0.2), launch(0.2), reason="a slower driver")
        document = json.loads(text_of(moved))
        for entry in (document["anchor"], document["history"][0]):
            entry["metrics"][name] *= 1.1
        golden(refused(json.dumps(document)))

    @pytest.mark.parametrize("name", ["recorded_at", "launches"])
    def test_an_anchor_is_the_first_acceptance_in_all_that_counts(self, name: str, golden: Golden) -> None:
        document = json.loads(text_of(BASELINE))
        document["anchor"][name] = {"recorded_at": "2025-01-01T00:00:00Z", "launches": 2}[name]
        golden(refused(json.dumps(document)))

    def test_where_a_steady_state_begins_may_be_seen_otherwise_by_another_version(self) -> None:
        # Its median may move with that, and the file of an older version must still be read.
        drifting = replace(launch(), ranks=(replace(launch().ranks[0], step_seconds=drift()),))
        document = json.loads(text_of(accepted(None, drifting)))
        for start in range(SPEC.warmup_steps, len(drift()) // 2 + 1):
            step = median(drift()[start:])
            for entry in (document["anchor"], *document["history"]):
                entry["metrics"] |= {"step_seconds": step, "tokens_per_second": 64 / step}
                entry["metrics"]["tokens_per_second_per_gpu"] = 64 / step
            assert parse(Baseline, json.dumps(document), "f").anchor.metrics["step_seconds"] == step

    def test_a_newer_schema_asks_for_an_upgrade(self, golden: Golden) -> None:
        golden(refused('{"schema": 2}'))

    def test_every_tenth_truncation_is_noticed(self) -> None:
        text = text_of(BASELINE).rstrip()
        for length in range(0, len(text), 10):
            refused(text[:length])

    @given(st.data())
    def test_a_truncated_file_is_always_noticed(self, data: st.DataObject) -> None:
        text = text_of(BASELINE).rstrip()
        refused(text[: data.draw(st.integers(0, len(text) - 1))])


def drift() -> tuple[float, ...]:
    """Steps that become slower."""
    return (0.5, *(0.1 + number / 1000 for number in range(SPEC.steps - 1)))


def refused(text: str) -> str:
    """The one line that says so."""
    with pytest.raises(BaselineError, match=r"^some/file\.json: ") as caught:
        parse(Baseline, text, "some/file.json")
    message = str(caught.value)
    assert "\n" not in message
    assert "delete it and record anew" in message or "upgrade" in message
    return message


class TestAccepting:
    def test_an_acceptance_whose_launches_are_gone_or_were_never_kept_holds_none(self) -> None:
        entry = replace(BASELINE.anchor, launches=len(BASELINE.launches))
        assert replace(BASELINE, history=(entry, entry)).held == [(entry, BASELINE.launches)]
        assert replace(BASELINE, history=(entry, replace(entry, launches=0))).held == []

    def test_the_first_is_the_anchor(self) -> None:
        assert BASELINE.history == (BASELINE.anchor,)
        assert BASELINE.anchor.metrics["step_seconds"] == pytest.approx(0.1)
        assert (BASELINE.id, BASELINE.digest, BASELINE.machine) == (SPEC.id, SPEC.digest, "m")

    def test_launches_that_pass_join_the_pool(self) -> None:
        grown = accepted(BASELINE, launch(0.101), launch(0.102))
        assert [entry.median_step_seconds for entry in grown.launches] == [0.1, 0.101, 0.102]
        assert (len(grown.history), grown.anchor) == (2, BASELINE.anchor)

    def test_the_pool_keeps_the_newest_24(self) -> None:
        full = accepted(None, *(launch(0.1 + index / 1e6) for index in range(30)))
        assert len(full.launches) == 24
        grown = accepted(full, launch(0.101))
        assert len(grown.launches) == 24
        assert grown.launches[-1].median_step_seconds == 0.101
        assert grown.launches[:-1] == full.launches[1:]

    @pytest.mark.parametrize(("step_seconds", "reason"), [(0.05, ""), (0.2, "a slower driver, reported")])
    def test_another_speed_replaces_the_pool_and_keeps_the_anchor(self, step_seconds: float, reason: str) -> None:
        moved = accepted(BASELINE, launch(step_seconds), launch(step_seconds), reason=reason)
        assert [entry.median_step_seconds for entry in moved.launches] == [step_seconds] * 2
        assert moved.anchor == BASELINE.anchor
        assert moved.history[-1].reason == reason

    def test_a_gain_of_one_launch_is_not_proven_and_replaces_nothing(self, golden: Golden) -> None:
        for launches in ([launch(0.05)], [launch(0.05), launch()]):
            with pytest.raises(BaselineError) as raised:
                accepted(BASELINE, *launches)
            golden(raised)

    def test_memory_moves_without_what_is_known_of_speed(self) -> None:
        grown = accepted(BASELINE, launch(), launch())
        lighter = accepted(grown, *[launch(reserved_bytes=2**29)] * 2)
        assert len(lighter.launches) == len(grown.launches) + 2
        assert judge([launch(reserved_bytes=2**29)], lighter, Policy.for_gpu()).verdict == "pass"
        assert judge([launch()] * 2, lighter, Policy.for_gpu()).verdict == "regressed"  # against what was accepted last

    @pytest.mark.parametrize("loss", ["stall_share", "first_step_seconds"])
    def test_a_loss_that_no_median_shows_leaves_what_is_known_of_speed_and_is_none_from_then_on(
        self, loss: str
    ) -> None:
        step, seconds = (9, 1.0) if loss == "stall_share" else (0, 9.0)
        good, slow = launch(), launch()
        times = [seconds if number == step else each for number, each in enumerate(slow.step_seconds)]
        slow = replace(slow, ranks=(replace(slow.ranks[0], step_seconds=tuple(times)),))
        grown = accepted(BASELINE, good, good)
        judgement = judge([slow, slow], grown, Policy.for_gpu())
        assert [check.metric for check in judgement.checks if check.verdict == "regressed"] == [loss]
        lost = accepted(grown, slow, slow, reason="a slower loader")
        assert len(lost.launches) == len(grown.launches) + 2
        assert judge([slow, slow], lost, Policy.for_gpu()).verdict == "pass"
        mended = accepted(lost, good)
        assert judge([slow, slow], mended, Policy.for_gpu()).verdict == "regressed"

    @pytest.mark.parametrize("reason", ["", "the first of its kind"])
    def test_first_steps_that_pass_do_not_raise_their_own_limit(self, reason: str) -> None:
        def starting_in(seconds: float) -> Launch:
            whole = launch()
            times = (seconds, *whole.step_seconds[1:])
            return replace(whole, ranks=(replace(whole.ranks[0], step_seconds=times),))

        grown = accepted(None, *[starting_in(1.0)] * 3, reason=reason)
        for number, seconds in enumerate((2.9, 8.4), 1):
            judgement = judge([starting_in(seconds)] * 2, grown, Policy.for_gpu())
            assert judgement.verdict == ("pass" if number == 1 else "regressed")
            if number == 1:
                grown = accepted(grown, *[starting_in(seconds)] * 2)

    def test_a_first_step_that_was_accepted_stays_accepted_while_it_lasts(self) -> None:
        whole = launch()
        slow = replace(whole, ranks=(replace(whole.ranks[0], step_seconds=(9.0, *whole.step_seconds[1:])),))
        lost = accepted(accepted(BASELINE, whole, whole, whole), slow, slow, reason="a new compiler")
        assert judge([slow, slow], accepted(lost, slow), Policy.for_gpu()).verdict == "pass"

    def test_one_launch_replaces_nothing_even_where_one_is_all_there_is(self, golden: Golden) -> None:
        alone = judge([launch(0.05)], BASELINE, replace(Policy.for_gpu(), rule=Rule(budget=1)))
        assert alone.verdict == "improved"
        for odd in (launch(0.05), launch(reserved_bytes=2**29)):
            with pytest.raises(BaselineError) as raised:
                accepted(BASELINE, odd, rule=Rule(budget=1))
            golden(raised)

    def test_one_launch_that_took_less_memory_becomes_no_reference(self, golden: Golden) -> None:
        usual, lean = launch(), launch(reserved_bytes=2**29)
        grown = accepted(BASELINE, usual, usual)
        with pytest.raises(BaselineError) as raised:
            accepted(grown, lean)
        golden(raised)
        for launches in ([lean, usual], [usual, lean]):
            assert judge([usual] * 2, accepted(grown, *launches), Policy.for_gpu()).verdict == "pass"

    def test_a_loss_needs_a_reason(self, golden: Golden) -> None:
        with pytest.raises(BaselineError) as caught:
            accepted(BASELINE, launch(0.2, reserved_bytes=2**31))
        golden(str(caught.value))

    def test_a_gain_does_not_pay_for_a_loss(self, golden: Golden) -> None:
        with pytest.raises(BaselineError) as raised:
            accepted(BASELINE, launch(0.05, reserved_bytes=2**31))
        golden(raised)

    def test_invalid_ones_are_refused_whatever_the_reason(self, golden: Golden) -> None:
        with pytest.raises(BaselineError) as raised:
            accepted(BASELINE, launch(loss=math.nan), reason="please")
        golden(raised)

    def test_no_launch_is_refused(self, golden: Golden) -> None:
        with pytest.raises(BaselineError) as raised:
            accepted(None, verdict="pass")
        golden(raised)

    def test_one_that_was_judged_as_new_replaces_nothing(self, golden: Golden) -> None:
        new = judge([launch(9.0)], None, Policy.for_gpu()).checks
        with pytest.raises(BaselineError) as raised:
            accepted(BASELINE, launch(9.0), verdict="new", checks=new, judged=None)
        golden(raised)

    def test_one_that_was_judged_against_another_does_not_join(self, golden: Golden) -> None:
        slower = accepted(BASELINE, launch(9.0), launch(9.0), reason="why")
        with pytest.raises(BaselineError) as raised:
            accepted(slower, launch(), judged=BASELINE)
        golden(raised)
        with pytest.raises(BaselineError, match="it is gone"):
            accepted(None, launch(), judged=BASELINE)

    def test_a_loss_that_is_not_proven_needs_a_reason_too_and_replaces(self, golden: Golden) -> None:
        slow = [launch(0.1021)]
        judgement = judge(slow, BASELINE, replace(Policy.for_gpu(), rule=Rule(budget=1)))
        assert judgement.verdict == "inconclusive"
        with pytest.raises(BaselineError) as raised:
            accepted(BASELINE, *slow, verdict="inconclusive", checks=judgement.checks)
        golden(raised)
        kept = accepted(BASELINE, *slow, verdict="inconclusive", checks=judgement.checks, reason="why")
        assert len(kept.launches) == 1

    def test_an_undecided_one_within_tolerance_joins(self) -> None:
        near = [launch(0.1019)]
        judgement = judge(near, BASELINE, replace(Policy.for_gpu(), rule=Rule(budget=1)))
        assert judgement.verdict == "inconclusive"
        assert len(accepted(BASELINE, *near, verdict="inconclusive", checks=judgement.checks).launches) == 2

    def test_an_injected_slowdown_is_never_recorded(self) -> None:
        with pytest.raises(BaselineError, match=r"LLMPERF_INJECT=slow=0\.03"):
            accepted(None, launch(evidence={"injected": "slow=0.03"}))


class TestMaturity:
    def test_three_sessions_calibrate(self) -> None:
        days = [replace(launch(), started_at=f"2026-01-0{day}T00:00:00Z") for day in (1, 1, 2, 3)]
        assert [(accepted(None, *days[:n]).sessions, accepted(None, *days[:n]).maturity) for n in (1, 2, 3, 4)] == [
            (1, "provisional"),
            (1, "provisional"),
            (2, "provisional"),
            (3, "calibrated"),
        ]

    @pytest.mark.parametrize(
        ("boots_and_gpus", "sessions"),
        [
            ([("a", "1"), ("b", "1"), ("c", "1")], 1),  # one GPU, booted three times
            ([("a", "1"), ("a", "2"), ("b", "2")], 1),  # two GPUs of one host that was booted anew
            ([("a", "1"), ("b", "2"), ("c", "3")], 3),  # lent machines share a name, and no GPU
        ],
    )
    def test_a_reboot_is_no_session(self, boots_and_gpus: list[tuple[str, str]], sessions: int) -> None:
        launches = [
            replace(run, ranks=tuple(replace(rank, boot=boot, device=f"GPU {gpu}", host="vm") for rank in run.ranks))
            for run, (boot, gpu) in zip([launch()] * 3, boots_and_gpus, strict=True)
        ]
        assert accepted(None, *launches).sessions == sessions


class TestDescribing:
    def test_a_first_one(self, golden: Golden) -> None:
        golden(describe(None, BASELINE))

    def test_old_new_and_anchor_side_by_side(self, golden: Golden) -> None:
        second = accepted(BASELINE, launch(0.05), launch(0.05))
        third = accepted(second, launch(0.2, reserved_bytes=3 * 2**20), reason="needed")
        golden(describe(second, third))

    def test_a_figure_that_was_not_recorded_is_a_dash(self) -> None:
        bare = replace(BASELINE, history=(replace(BASELINE.anchor, metrics={}),))
        assert describe(None, bare)[1].split() == ["new", "-", "-", "2026-01-01"]
