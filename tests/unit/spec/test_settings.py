"""One file for a setting: each has all its parts, its twin in the worker, and no other file says its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import pytest_llmperf
from pytest_llmperf import TrainSpec
from pytest_llmperf.settings.registry import SETTINGS, Evidence, RunEvidence
from pytest_llmperf.settings.setting import Setting, read_evidence, stored_evidence

PACKAGE = Path(pytest_llmperf.__file__).parent
WORKERS = PACKAGE / "worker" / "settings"

#: Those that stand in the file of another.
HOME = {
    "duration": "batch",
    "experts": "attention",
    "hub_kernels": "liger",
    "offloading": "compilation",
    "recomputation": "compilation",
    "weights": "data",
}

#: How long a training is measured is no work, a batch is two of the Trainer's own arguments, and an optimizer one; a
#: model is built with its weights.
WITHOUT_TWIN = {"batch", "duration", "weights"}

#: Of these no training tells by itself: a batch by its tokens, how long it was by its steps, weights by its losses.
WITHOUT_EVIDENCE = {"batch", "duration", "weights"}

names = pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)


def test_every_field_of_a_spec_is_one_settings() -> None:
    owned = [name for setting in SETTINGS for name in setting.fields]
    assert sorted(["model", *owned]) == sorted(each.name for each in fields(TrainSpec))


@names
def test_a_setting_has_its_parts(setting: Setting) -> None:
    assert (
        f'    name="{setting.name}",'
        in (PACKAGE / "settings" / f"{HOME.get(setting.name, setting.name)}.py").read_text()
    )
    assert {*setting.values, *setting.in_id, *setting.checks} <= {*setting.fields}
    assert (setting.evidence is None) == (setting.name in WITHOUT_EVIDENCE)
    assert bool(setting.checks) == (setting.evidence is not None)
    assert bool(setting.in_id) != (setting.name == "duration")


@names
def test_a_setting_changes_only_its_own_fields(setting: Setting) -> None:
    spec = TrainSpec(model="llama-tiny", sequence_length=64)
    for changed in (setting.small(spec), setting.plain(spec), setting.in_fp32(spec)):
        assert {*changed} <= {*setting.fields}


def test_the_worker_has_a_twin_of_each() -> None:
    there = {path.stem for path in WORKERS.glob("*.py")} - {"__init__"}
    twins = {setting.name for setting in SETTINGS} - WITHOUT_TWIN
    assert there == {HOME.get(name, name) for name in twins}
    applied, looked = ((WORKERS.parent / name).read_text(encoding="utf-8") for name in ("build.py", "evidence.py"))
    for name in there:
        text = (WORKERS / f"{name}.py").read_text(encoding="utf-8")
        assert "\nPREPARE = " in text or "\ndef arguments(" in text or f"{name}." in applied + looked
    witnessed = "".join(path.read_text(encoding="utf-8").rpartition("\nWITNESSES")[2] for path in WORKERS.glob("*.py"))
    assert {name for name in twins if f'"{name}": ' in witnessed} == twins
    assert "spec.weights" in applied


def test_no_two_settings_tell_one_key() -> None:
    kinds: list[type[Any]] = [RunEvidence, *(setting.evidence for setting in SETTINGS if setting.evidence)]
    keys = [each.name for kind in kinds for each in fields(kind)]
    assert len(keys) == len({*keys})


def test_evidence_is_stored_as_it_was_read() -> None:
    stored = {
        "autocast_dtype": None,
        "data_prefetch": None,
        "data_workers": 2,
        "data_pinned": False,
        "tf32": False,
        "liger_modules": 0,
        "liger_forwards": [],
        "kept_dtypes": {"torch.float32": 8},
        "mesh": [2],
    }
    seen = Evidence.read(stored)
    parts = (seen.run, *seen.parts.values())
    written = {name: value for part in parts for name, value in stored_evidence(part).items() if name in stored}
    assert written == stored
    assert seen.precision.autocast_dtype == ""
    for setting in SETTINGS:
        if setting.evidence:  # of nothing nothing is read
            assert read_evidence(setting.evidence, {}) == setting.evidence()


#: Everybody may ask how many GPUs a launch takes and by what seed it is drawn, how large it is and how long it takes.
EVERYBODYS = {"gpus", "seed"} | {name for setting in SETTINGS if setting.evidence is None for name in setting.fields}

#: Why each of these names a setting, or some; the registry, which a spec is part of, and the estimate may.
EXCEPTIONS = {
    "analysis/expectation.py": "which settings each kind of work is alike by, and what recomputation does to it",
    "analysis/formulas.py": "what the prediction's formula leaves out, a line for each",
    "analysis/ladder.py": "the chapter's rungs are specs",
    "cli/commands/report.py": "tables of the chapter: of its rungs by their settings, of scaling by parallelism",
    "run/tuning/tuner.py": "which settings ask for less memory, where nothing can be predicted",
    "run/tuning/winner.py": "a launch of a compiled case compiles for some seconds",
    "judge/store.py": "a text that is not here has its identity in the file",
    "judge/validity.py": "a line about an update names the optimizer",
    "launch/prediction.py": "an estimate with Liger imports Liger",
    "observe/tracer.py": "the rows are a trace's",
    "plugin/hooks.py": "fixtures of the suite, public by these names",
    "worker/build.py": "lists what each setting gives the Trainer and the model",
    "worker/recipes/huggingface/data.py": "makes what the setting data asks for",
    "worker/recipes/huggingface/inspection.py": "fp8 scales follow the data: what comes later changes what was before",
    "worker/recipes/huggingface/parity.py": "the truth is trained without autocast, by the plain optimizer",
    "worker/recipes/huggingface/small_trainer.py": "looks into a model where nothing compiled changes by it",
    "worker/recipes/huggingface/trainer.py": "asks who fetches, and whether a checkpoint is saved",
}


def _named(source: str) -> Iterator[str]:
    """Fields of settings that ``source`` reads of a spec, or gives to one."""
    owned = {name for setting in SETTINGS for name in setting.fields} - EVERYBODYS
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in owned and "spec" in ast.unparse(node.value).split(".")[-1]:
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("replace", "TrainSpec"):
            yield from (word.arg for word in node.keywords if word.arg in owned)


def test_no_other_file_names_a_setting() -> None:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(("settings/", "worker/settings/", "worker/estimate/")):
            words = sorted({*_named(path.read_text(encoding="utf-8"))})
            if words:
                found[name] = words
    assert {name: words for name, words in found.items() if name not in EXCEPTIONS} == {}
    assert {*EXCEPTIONS} <= {*found}, "these name none any more"
