"""The settings of a TrainSpec, and what is made of all of them: ids, checks, needs, small forms. A new one is listed
here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, cast

from pytest_llmperf.settings import (
    attention,
    batch,
    compilation,
    data,
    duration,
    liger,
    optimizer,
    parallelism,
    precision,
    recomputation,
    weights,
)
from pytest_llmperf.settings.batch import PASSES, SEQUENCES
from pytest_llmperf.settings.setting import Fields, Package, Setting, TrainSpec
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.support.user_input import first_few, hint

#: In the order in which a search decides.
SETTINGS: tuple[Setting, ...] = (
    precision.SETTING,
    attention.SETTING,
    liger.SETTING,
    compilation.SETTING,
    optimizer.SETTING,
    recomputation.SETTING,
    parallelism.SETTING,
    batch.SETTING,
    data.SETTING,
    weights.SETTING,
    duration.SETTING,
)

# In the order of ids, which is older.
_ORDER = "precision attention liger compilation recomputation optimizer batch parallelism data weights duration".split()
_IN_ID = sorted(SETTINGS, key=lambda setting: _ORDER.index(setting.name))


def words_in_id(spec: TrainSpec) -> Iterator[str]:
    """What an id says of every setting that is on."""
    for setting in _IN_ID:
        for name, words in setting.in_id.items():
            if callable(words):
                yield words(spec)
            elif _is_set(spec, name):
                yield words.format(getattr(spec, name))


def _is_set(spec: TrainSpec, name: str) -> bool:
    return bool(getattr(spec, name) != getattr(type(spec), name))


def value_problems(spec: TrainSpec) -> Iterator[str]:
    """Why values cannot be, a line each; fields are of their types. A ``SpecError`` where there is no such text."""
    for setting in SETTINGS:
        for name, least in setting.least.items():
            value = getattr(spec, name)
            if value is not None and value < least:
                or_none = ", or left out" if getattr(type(spec), name) is None else ""
                yield f"TrainSpec: {name}={value} must be at least {least}{or_none}"
        yield from setting.problems(spec)
        for name, known in setting.values.items():
            value = getattr(spec, name)
            if value not in known:
                yield f"TrainSpec: unknown {name} {value!r}{hint(value, known)}; known: {first_few(known)}"


def clashes(spec: TrainSpec) -> Iterator[str]:
    """Why these settings cannot train together and what to do instead, a line each."""
    for setting in SETTINGS:
        for name in setting.switched:
            if _is_set(spec, name) and not getattr(spec, setting.switch):
                yield f"{name}={getattr(spec, name)!r} without {setting.switch}=True changes nothing"
        line = setting.clash(spec)
        if line:
            yield line


def packages(spec: TrainSpec) -> Iterator[Package]:
    """What it needs installed beside what every training does."""
    return (package for setting in SETTINGS if (package := setting.needs(spec)) is not None)


def missing_package(spec: Spec) -> str | None:
    """The package that its settings need and this environment does not have, and how to install it."""
    wanted = () if spec.is_script else packages(cast("TrainSpec", spec))
    missing = (package for package in wanted if find_spec(package.module) is None)
    return next((f"{spec.id} needs {package.name}: pip install {package.install}" for package in missing), None)


def why_skip(spec: Spec, *, num_gpus: int, num_cores: int) -> str | None:
    """Why it cannot run here, said before anything is launched; ``num_gpus`` 0 is the CPU."""
    if num_gpus and spec.gpus > num_gpus:
        return f"{spec.id} needs {spec.gpus} GPUs, this run may use {num_gpus} (--gpus)"
    if not num_gpus:
        if spec.gpus > num_cores:
            return f"{spec.id} needs {spec.gpus} ranks, this CPU runs {num_cores} at a time"
        ours = () if spec.is_script else SETTINGS
        why = next((why for setting in ours if (why := setting.why_not_on_cpu(cast("TrainSpec", spec)))), None)
        if why:
            return f"{spec.id}: {why}; run with --gpus {spec.gpus}"
    return missing_package(spec)


# A spec made small, and its plainest form: what parity trains in their place.


def small(spec: TrainSpec) -> TrainSpec:
    """``spec`` with a step of ``SEQUENCES`` short sequences, on as few ranks as show that they share it."""
    return _changed(spec, *(setting.small for setting in SETTINGS))


def plainest(spec: TrainSpec) -> TrainSpec:
    """The same small training with nothing that makes it fast: what is left decides what is learnt."""
    return _changed(spec, *(setting.small for setting in SETTINGS), *(setting.plain for setting in SETTINGS))


def in_pieces(plain: TrainSpec) -> TrainSpec:
    """The plain form with each step in several passes: another order of the same sums."""
    return replace(plain, gradient_accumulation_steps=SEQUENCES // PASSES, micro_batch_size=PASSES)


def in_fp32(spec: TrainSpec) -> TrainSpec:
    """``spec`` in fp32, where rounding hides least; attention by a kernel that has fp32 where its own has none."""
    return _changed(spec, *(setting.in_fp32 for setting in SETTINGS))


def _changed(spec: TrainSpec, *parts: Fields) -> TrainSpec:
    values: dict[str, Any] = {name: value for part in parts for name, value in part(spec).items()}
    return replace(spec, **values)
