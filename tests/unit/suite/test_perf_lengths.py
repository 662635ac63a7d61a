"""The suite's own data on long contexts: what is declared not to fit was predicted so, and a visit has it all."""

from __future__ import annotations

import csv
import re
import shlex

import pytest

from perf_tests.fine_tuning import FINE_TUNING, FineTuning
from perf_tests.lengths import LENGTHS, LONG_CONTEXT, LONG_CONTEXT_ON_CPU
from pytest_llmperf import TrainSpec
from tools import lengths, visit
from tools.tables import FOLDER

VISITS = [visit.REPOSITORY / "tools" / "visits" / f"{name}.toml" for name in ("long-context", "long-context-four")]


def predicted() -> dict[tuple[str, ...], dict[str, str]]:
    """The rows that the documentation shows, by what was asked for."""
    with (FOLDER / f"{lengths.NAME}.csv").open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    return {tuple(row[name] for name in lengths.HEADER[:5]): row for row in rows}


def node(spec: TrainSpec) -> str:
    return f"perf_tests/test_lengths.py::test_length[{spec.id}]"


@pytest.mark.parametrize("case", LONG_CONTEXT, ids=lambda case: case.spec.id)
def test_what_is_declared_not_to_fit_was_predicted_so(case: FineTuning) -> None:
    row, below = predicted()[lengths.asked(case.spec)], case.oom_below_gib or 0.0
    if row["predicted"] == "not modelled":
        assert not below
        return
    gib = float(row["predicted"].removesuffix(" GiB"))
    assert not below or 0.97 * gib < below < gib
    for card, said in zip(lengths.CARDS, (row["80 GB"], row["140 GB"]), strict=True):
        assert said == lengths.fits(gib, card)
        assert (said == "no") == (below > card)


def test_each_model_has_a_way_to_each_length_on_a_card_of_80_gb_or_two() -> None:
    for model in ("llama-3.2-1b", "llama-3.1-8b"):
        ways = [row for row in predicted().values() if row["model"] == model and row["trained"] == "all weights"]
        fit = {int(row["tokens"].replace(",", "")) for row in ways if row["80 GB"] == "yes" and int(row["GPUs"]) <= 2}
        assert fit == {*LENGTHS}


def test_each_row_is_a_case() -> None:
    assert predicted().keys() == {lengths.asked(case.spec) for case in LONG_CONTEXT}


def test_no_two_cases_are_the_same() -> None:
    for cases in (LONG_CONTEXT, LONG_CONTEXT_ON_CPU):
        assert len({case.spec.id for case in cases}) == len({case.spec.digest for case in cases}) == len(cases)


def test_the_tiny_ones_differ_as_the_large_ones_do_and_are_short() -> None:
    assert {case.spec.sequence_length for case in LONG_CONTEXT_ON_CPU} == {length // 128 for length in LENGTHS}
    assert {(case.spec.gpus, case.spec.liger, case.spec.offloading) for case in LONG_CONTEXT_ON_CPU} == {
        (1, False, "no")
    }


@pytest.mark.parametrize("word", ["liger", "checkpointing", "lora", "nf4", "offload", "context", "fsdp"])
def test_a_settings_word_selects_what_has_it_on(word: str) -> None:
    for spec in (case.spec for case in (*LONG_CONTEXT, *LONG_CONTEXT_ON_CPU)):
        on = {
            "liger": spec.liger,
            "checkpointing": spec.gradient_checkpointing,
            "lora": spec.lora,
            "nf4": spec.lora_base == "nf4",
            "offload": spec.offloading != "no",
            spec.parallelism: True,
        }
        assert (word in node(spec)) == on.get(word, False)


def selects(run: str, name: str) -> bool:
    """As its ``-k`` does."""
    words = shlex.split(run)
    told = re.sub(r"[\w.]+", lambda word: _in(word.group(), name), words[words.index("-k") + 1])
    return bool(eval(told, {}))  # of this repository, and truths alone are left


def _in(word: str, name: str) -> str:
    return word if word in ("and", "or", "not") else str(word in name)


def test_a_visit_has_each_case_once_on_as_many_gpus_as_it_takes() -> None:
    runs = [(len(lane["gpus"]), step["run"]) for lane in visit.read_plans(VISITS) for step in lane["steps"]]
    stored = {case.spec.digest for case in FINE_TUNING}
    for spec in (case.spec for case in LONG_CONTEXT):
        asked = [(gpus, run) for gpus, run in runs if selects(run, node(spec))]
        assert len(asked) == 1 or spec.digest in stored
        assert all(gpus >= spec.gpus and f"--gpus {spec.gpus} " in run for gpus, run in asked)
