"""A soak judged against itself: what changes, stalls or only grows is found, and what a healthy one does is not."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.judge.soak import Diary, SoakRule, judge_folder, judge_soak
from pytest_llmperf.judge.stats import Spread
from pytest_llmperf.records.ranks import Entry, Sensed
from pytest_llmperf.records.result import Soak
from pytest_llmperf.settings.spec import ScriptSpec, Spec
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec
from tests.examples import examples
from tests.fakes import ENVIRONMENT

GPU = SoakRule(0.02, Spread(0.004, 8), on_cpu=False)
CPU = SoakRule(0.5, Spread(0.05, 8), on_cpu=True)
REPOSITORY = Path(__file__).parents[3]
SPEC = TrainSpec(model="llama-tiny", sequence_length=512, micro_batch_size=4, gpus=2)

Step = Callable[[int], tuple[float, float, float]]


def steady(number: int, step: float = 0.05, sd: float = 0.003, seed: int = 1) -> list[float]:
    chance = random.Random(f"{seed} {number}")
    return [step * math.exp(chance.gauss(0, sd)) for _ in range(number)]


def diary(
    seconds: Sequence[float],
    *,
    fetched: Mapping[int, float] | None = None,
    collected: Mapping[int, float] | None = None,
    written: Mapping[int, int] | None = None,
    process: Mapping[str, Callable[[int], float]] | None = None,
) -> Diary:
    """Entries of half a second; ``process`` says what there is after so many steps, the others what step N had."""
    entries, open_, now, bytes_, last = list[Entry](), list[tuple[float, float, float]](), 1000.0, 0, 1000.0
    usual: dict[str, Callable[[int], float]] = {
        "allocated_bytes": lambda _: 2 * 10**9,
        "host_bytes": lambda _: 4 * 10**9,
        "open_files": lambda _: 20,
        "threads": lambda _: 30,
        "waited_seconds": lambda _: 0.0,
    }
    for number, step in enumerate(seconds):
        now, bytes_ = now + step, bytes_ + (written or {}).get(number, 300)
        open_.append((step, (fetched or {}).get(number, 0.0002), (collected or {}).get(number, 0.0)))
        if now - last >= 0.5 or number == len(seconds) - 1:
            values: Any = {name: of(number) for name, of in (usual | dict(process or {})).items()}
            entries.append(Entry(time=now, steps=tuple(open_), written_bytes=bytes_, **values))
            open_, last = [], now
    return Diary(entries)


def judged(*ranks: Diary, sensed: Sequence[Sensed] = (), rule: SoakRule = GPU) -> Soak:
    return judge_soak(600.0, ranks, sensed, rule)


def test_a_steady_soak_has_no_finding() -> None:
    found = judged(diary(steady(6000)))
    assert found.findings == found.unheld == ()
    assert found.steps == 6000
    assert len(found.series["step_seconds"]) == 120


def test_steps_that_become_longer_are_found_with_the_step_and_the_minute() -> None:
    seconds = [step * (1.05 if number >= 3000 else 1) for number, step in enumerate(steady(6000))]
    (line,) = judged(diary(seconds)).findings
    assert line.startswith(("steps take 5.", "steps take 4.9"))
    assert "minute 2.5" in line
    assert " on " in line


def test_what_is_slower_for_a_while_is_told_with_its_end() -> None:
    seconds = [step * (1.20 if 3000 <= number < 4000 else 1) for number, step in enumerate(steady(6000))]
    (line,) = judged(diary(seconds)).findings
    assert " to " in line
    assert line.endswith("3.2 % of the time")


@pytest.mark.parametrize("steps", [range(3000, 3200), range(5800, 6000)], ids=["over", "just begun"])
def test_what_cost_little_by_its_end_is_a_hosts_mood_and_passes(steps: range) -> None:
    seconds = [step * (1.17 if number in steps else 1) for number, step in enumerate(steady(6000))]
    found = judged(diary(seconds))
    assert found.findings == ()
    assert all("longer" in line for line in found.unheld)


def test_a_mood_hides_no_level_that_lasts() -> None:
    def share(number: int) -> float:
        return 1.17 if number in range(2000, 2600) else 1.05 if number >= 4000 else 1

    found = judged(diary([step * share(number) for number, step in enumerate(steady(6000))]))
    (line,) = found.findings
    assert " on (minute" in line
    assert any(" to 2," in line for line in found.unheld)


def test_a_change_within_tolerance_is_told_and_passes() -> None:
    seconds = [step * (1.018 if number >= 3000 else 1) for number, step in enumerate(steady(6000))]
    found = judged(diary(seconds))
    assert found.findings == ()
    assert found.unheld[0].startswith("steps take 1.")


def test_a_slow_drift_is_found() -> None:
    seconds = [step * (1 + 0.08 * number / 6000) for number, step in enumerate(steady(6000))]
    assert "longer" in judged(diary(seconds)).findings[0]


def test_the_loader_garbage_collection_or_a_lower_clock_are_named_as_the_reason() -> None:
    seconds = [step + (0.01 if number >= 3000 else 0) for number, step in enumerate(steady(6000))]
    late = dict.fromkeys(range(3000, 6000), 0.0102)
    assert ", in its loader" in judged(diary(seconds, fetched=late)).findings[0]
    assert ", in garbage collection" in judged(diary(seconds, collected=late)).findings[0]
    sensed = [Sensed(time=1000.0 + at, clock_mhz=1980 if at < 160 else 1650, joules=500.0 * at) for at in range(340)]
    assert "1650 MHz after 1980" in judged(diary(seconds), sensed=sensed).findings[0]


def test_a_wait_for_a_core_is_no_drift() -> None:
    seconds = [step * (1.5 if number >= 3000 else 1) for number, step in enumerate(steady(6000))]
    found = judged(diary(seconds, process={"waited_seconds": lambda number: 0.17 if number >= 3000 else 0.0}))
    assert found.findings == ()


@pytest.mark.parametrize(
    ("of", "cause"),
    [
        ("fetched", "its loader"),
        ("collected", "garbage collection"),
        ("written", "a checkpoint"),
        ("", "something unknown"),
    ],
)
def test_what_stalls_a_step_each_so_many_is_named(of: str, cause: str) -> None:
    at = range(0, 6000, 50)
    seconds = [step + (0.2 if number in at else 0) for number, step in enumerate(steady(6000))]
    how: dict[str, Any] = {of: dict.fromkeys(at, 3 * 2**20 if of == "written" else 0.2)} if of else {}
    (line,) = judged(diary(seconds, **how)).findings
    assert line.startswith(cause)
    assert "each 50 steps" in line


def test_a_checkpoint_is_named_whose_bytes_the_line_before_has() -> None:
    at = range(10, 6000, 61)  # each the first of its line
    seconds = [step + (0.6 if number in at else 0) for number, step in enumerate(steady(6000, step=0.0505, sd=0))]
    before = {number - 1: 3 * 2**20 for number in at}
    assert judged(diary(seconds, written=before)).findings[0].startswith("a checkpoint")


def each_of(seconds: Sequence[float]) -> Callable[[int], float]:
    """What an entry has of these, by the number of its last step."""
    last = 0

    def since(number: int) -> float:
        nonlocal last
        first, last = last, number + 1
        return sum(seconds[first:last])

    return since


@pytest.mark.parametrize(
    ("does", "on_cpu"), [("waits", True), ("waits", False), ("computes", True), ("computes", False)]
)
def test_where_no_part_is_to_blame_it_is_told_whether_the_thread_computed_or_waited(does: str, on_cpu: bool) -> None:
    words = "a wait" if does == "waits" else "more work" if on_cpu else "host or GPU"
    rule, usual = SoakRule(0.02, Spread(0.004, 8), on_cpu=on_cpu), steady(6000)
    for longer in (range(3000, 6000), range(0, 6000, 50)):
        seconds = [step + (0.1 if number in longer else 0) for number, step in enumerate(usual)]
        computed = each_of(seconds if does == "computes" else usual)
        (line,) = judged(diary(seconds, process={"computed_seconds": computed}), rule=rule).findings
        assert words in line


def test_stalls_of_which_most_is_a_wait_for_a_core_are_only_told() -> None:
    at = range(0, 6000, 50)
    seconds = [step + (0.2 if number in at else 0) for number, step in enumerate(steady(6000))]
    waits = each_of([0.19 if number in at else 0 for number in range(6000)])
    found = judged(diary(seconds, process={"waited_seconds": waits}))
    assert found.findings == ()
    assert found.unheld[0].startswith("a wait for a core")


def test_stalls_at_no_distance_that_nobody_explains_are_only_told() -> None:
    chance = random.Random(3)
    at = set(chance.sample(range(6000), 120))
    seconds = [step + (0.2 if number in at else 0) for number, step in enumerate(steady(6000))]
    found = judged(diary(seconds))
    assert found.findings == ()
    assert "something unknown" in found.unheld[0]


def test_slow_steps_in_a_row_are_no_stalls_each_so_many() -> None:
    seconds = [step * (10 if 3001 <= number < 3041 else 1) for number, step in enumerate(steady(6000))]
    found = judged(diary(seconds))
    assert found.findings == ()
    assert " 40 times, " in found.unheld[0]


@pytest.mark.parametrize(
    ("name", "each", "words"),
    [
        ("allocated_bytes", 4096.0, "4 KiB a step"),
        ("host_bytes", 65536.0, "64 KiB a step"),
        ("open_files", 0.05, "open files only grow"),
        ("threads", 0.01, "threads only grow"),
    ],
)
def test_what_only_grows_is_a_leak(name: str, each: float, words: str) -> None:
    (line,) = judged(diary(steady(6000), process={name: lambda number: 1000 + int(each * number)})).findings
    assert words in line


@pytest.mark.parametrize(
    ("grown", "rule", "words"),
    [
        (
            {"Tensor in 'kept' of train.py": 1.0, "list": 2.5},
            GPU,
            "an hour; each step leaves 1 Tensor in 'kept' of train.py, 2.5 list",
        ),
        ({}, GPU, "no kind of Python object grows with it: PyTorch's memory history tells"),
        ({}, CPU, "no kind of Python object grows with it: memray tells"),
        (None, GPU, "an hour"),
    ],
)
def test_a_leak_of_memory_has_the_objects_that_each_step_leaves(
    grown: dict[str, float] | None, rule: SoakRule, words: str
) -> None:
    leaks = diary(steady(6000), process={"host_bytes": lambda number: 4e9 + 65536.0 * number})
    last = replace(leaks.entries[-1], grown=grown)
    (line,) = judged(Diary([*leaks.entries[:-1], last]), rule=rule).findings
    assert line.endswith(words) or f"{words} which line" in line


def test_what_grows_at_first_alone_is_no_leak() -> None:
    def settles(number: int) -> float:
        return 4e9 + 3e8 * (1 - math.exp(-number / 800))

    assert judged(diary(steady(6000), process={"host_bytes": settles, "allocated_bytes": settles})).findings == ()


def test_what_stays_as_it_is_for_a_third_of_the_steps_does_not_only_grow() -> None:
    def rests(number: int) -> int:
        return 20 + min(number, max(1500, number - 2000)) // 100

    assert judged(diary(steady(6000), process={"open_files": rests})).findings == ()


def test_a_leak_is_found_where_steps_become_longer_meanwhile() -> None:
    seconds = [step * (10 if number >= 3000 else 1) for number, step in enumerate(steady(6000))]
    found = judged(diary(seconds, process={"threads": lambda number: number // 50}))
    assert "threads only grow" in found.findings[-1]


def test_the_rank_that_leaks_is_named_and_all_of_them_are_not() -> None:
    fine, leaks = diary(steady(6000)), diary(steady(6000), process={"open_files": lambda number: number // 20})
    assert "on rank 1" in judged(fine, leaks).findings[0]
    assert "on all ranks" in judged(leaks, leaks).findings[0]


def test_the_memory_of_a_cpus_tensors_is_not_told_twice() -> None:
    grows: dict[str, Callable[[int], float]] = dict.fromkeys(
        ("allocated_bytes", "host_bytes"), lambda number: 4e8 + 65536.0 * number
    )
    (line,) = judged(diary(steady(6000), process=grows), rule=CPU).findings
    assert "tensors" in line


def test_too_few_steps_decide_nothing(tmp_path: Path) -> None:
    (tmp_path / "diary-0-1.jsonl").write_text(
        "\n".join(json.dumps(codec.plain(each)) for each in diary(steady(80)).entries)
    )
    found = judge_folder(tmp_path, 4.0, SPEC, GPU)
    assert found["verdict"] == "inconclusive"
    assert re.match(r"only \d+ steps after the warm-up, too few to judge their speed: 96 ", found["reason"])


def leave(folder: Path, *ranks: Diary) -> None:
    for number, rank in enumerate(ranks):
        lines = [json.dumps(codec.plain(one)) for one in rank.entries]
        (folder / f"diary-{number}-1.jsonl").write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.parametrize(
    ("why", "verdict"), [("", "pass"), ("it broke", "invalid"), ("interrupted", "inconclusive")], ids=str
)
def test_what_ended_one_before_its_time_decides_where_nothing_became_worse(
    tmp_path: Path, why: str, verdict: str
) -> None:
    leave(tmp_path, diary(steady(6000)))
    found = judge_folder(tmp_path, 600.0, SPEC, GPU, why)
    assert found["verdict"] == verdict
    assert found["reason"].endswith(f": {why}" if why else "became worse")


def test_no_step_at_all_is_invalid(tmp_path: Path) -> None:
    assert judge_folder(tmp_path, 4.0, SPEC, GPU, "it broke") == {"verdict": "invalid", "reason": "it broke"}


@pytest.mark.parametrize(
    ("spec", "rate", "value"),
    [
        (SPEC, "tokens_per_second_per_gpu", 8 * 512 / 2 / 0.05),
        (ScriptSpec(command="python t.py", gpus=2), "steps_per_second", 20.0),
        (ScriptSpec(command="python t.py", gpus=2, tokens="sequences:64"), "sequences_per_second_per_gpu", 640.0),
    ],
    ids=["tokens", "steps", "sequences"],
)
def test_it_has_the_figures_of_a_launch(tmp_path: Path, spec: Spec, rate: str, value: float) -> None:
    """Of the fullest rank, and where it ran."""
    small: dict[str, Callable[[int], float]] = {
        "peak_reserved_bytes": lambda _: 10,
        "peak_allocated_bytes": lambda _: 7,
    }
    ranks = [diary(steady(2000, sd=0), process=each) for each in (small, small | {"peak_reserved_bytes": lambda _: 20})]
    leave(tmp_path, *ranks)
    (tmp_path / "environment.json").write_text(json.dumps(codec.plain(ENVIRONMENT)), encoding="utf-8")
    found = judge_folder(tmp_path, 100.0, spec, GPU)
    assert {check.metric: check.value for check in found["checks"]} == {
        rate: pytest.approx(value),
        "step_seconds": pytest.approx(0.05),
        "peak_reserved_bytes": 20,
        "peak_allocated_bytes": 7,
        "steps": 2000,
    }
    assert found["soak"].environment == ENVIRONMENT


def test_steps_of_as_many_tokens_as_their_documents_have_no_rate(tmp_path: Path) -> None:
    leave(tmp_path, diary(steady(2000, sd=0)))
    found = judge_folder(tmp_path, 100.0, replace(SPEC, data="text", rows="padding_free"), GPU)
    assert {check.metric for check in found["checks"]} >= {"step_seconds", "steps"}
    assert "tokens_per_second_per_gpu" not in {check.metric for check in found["checks"]}


@given(st.lists(st.floats(0.001, 30.0), min_size=1, max_size=400), st.booleans())
@examples(25)
def test_any_steps_can_be_judged(seconds: list[float], on_cpu: bool) -> None:
    found = judged(diary(seconds), rule=CPU if on_cpu else GPU)
    assert found.steps == len(seconds)
    json.dumps(found.series, allow_nan=False)


@given(st.integers(0, 10_000), st.floats(0.001, 0.5))
@examples(25)
def test_a_verdict_does_not_depend_on_how_long_a_step_is(seed: int, step: float) -> None:
    seconds = steady(1500, step=step, seed=seed)
    assert judged(diary(seconds)).findings == ()


def stored() -> Iterator[list[float]]:
    """Of unchanged cases on four GPUs of a host: logarithms of steps beside the case's own median there."""
    launches: dict[tuple[str, str], list[list[float]]] = {}
    for line in (REPOSITORY / "docs/data/h200-waits.jsonl").read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        if not values["injected"]:
            launches.setdefault((values["spec"], values["site"]), []).append(values["step_seconds"][10:])
    for several in launches.values():
        middle = math.log(median(step for one in several for step in one))
        if len(several) > 1:
            yield from ([math.log(step) - middle for step in one] for one in several)


def test_a_host_that_moves_most_steps_up_and_down_raises_no_alarm_and_hides_no_change() -> None:
    """Bursts of a minute in which most steps take 5 to 40 % longer."""
    chance = random.Random(4)

    def share(number: int) -> float:
        return chance.uniform(1.05, 1.4) if number % 2000 >= 900 and chance.random() < 0.7 else 1.0

    loud = [step * share(number) for number, step in enumerate(steady(6000))]
    found = judged(diary(loud))
    assert found.findings == ()
    assert found.unheld
    assert judged(diary([step * (1.049 if number >= 3000 else 1) for number, step in enumerate(loud)])).findings


def test_what_only_some_of_the_steps_have_is_found() -> None:
    seconds = [step * (1.08 if number >= 3000 and number % 3 else 1) for number, step in enumerate(steady(6000))]
    assert judged(diary(seconds)).findings


@pytest.mark.simulated
@pytest.mark.parametrize("slower", [0.0, 0.04])
def test_stored_steps_in_a_row_raise_few_alarms_and_hide_no_change(slower: float) -> None:
    """Pieces of launches, each with the level that it had: a launch by itself wanders less."""
    pieces, chance, alarms = list(stored()), random.Random(5), 0
    for _ in range(60):
        logs = list[float]()
        while len(logs) < 4000:
            logs += chance.choice(pieces)
        seconds = [0.1 * math.exp(log + (slower if number > 2200 else 0)) for number, log in enumerate(logs)]
        alarms += bool(judged(diary(seconds)).findings)
    assert alarms <= 1 if not slower else alarms >= 58
