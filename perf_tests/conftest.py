"""Turns the suite's data into parametrized cases, for the machine at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from perf_tests.capacity import CAPACITIES
from perf_tests.families import FAMILIES, Family
from perf_tests.fine_tuning import FINE_TUNING, FINE_TUNING_ON_CPU, FineTuning
from perf_tests.gains import GAINS, Gain, specs_of
from perf_tests.ladder import LADDER, Rung, oom_below_gib
from perf_tests.lengths import LONG_CONTEXT, LONG_CONTEXT_ON_CPU
from perf_tests.optimisations import OPTIMISATIONS, OPTIMISATIONS_ON_CPU, Optimisation
from perf_tests.parity import PARITY, PARITY_ON_CPU
from perf_tests.real_data import REAL_DATA, REAL_DATA_ON_CPU, TextCase
from perf_tests.scaling import SHARDED, SHARDED_ON_CPU, STRONG, STRONG_ON_CPU, WEAK, WEAK_ON_CPU, Width
from perf_tests.texts import TROUBLE
from pytest_llmperf import GIB, DidNotTrain, TrainSpec, is_active, on_cpu

_NOT_HERE = pytest.param(None, id="on-a-gpu", marks=pytest.mark.skip(reason="these settings are for a GPU: --gpus 1"))


def pytest_configure() -> None:
    if TROUBLE:
        raise pytest.UsageError(TROUBLE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not is_active(config):  # -p no:llmperf: there is nothing to run
        return True
    # Minutes of a GPU, for what changes with the code and not from night to night: who wants it names it.
    is_named = any(collection_path.name in word for word in config.args)
    return True if collection_path.name == "test_parity.py" and not is_named else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in metafunc.fixturenames:
        if name in _CASES:
            metafunc.parametrize(name, _CASES[name](on_cpu(metafunc.config)) or [_NOT_HERE])


def _oom(below_gib: float | None) -> list[Any]:
    return [pytest.mark.expects_oom(below_gib=below_gib)] if below_gib else []


def _optimisation(one: Optimisation) -> Any:
    fails = pytest.mark.xfail(raises=DidNotTrain, strict=True, reason=one.known_to_fail)
    return pytest.param(
        one, id=one.spec.id, marks=[*([fails] if one.known_to_fail else []), *_oom(oom_below_gib(one.spec))]
    )


def _gain(gain: Gain, cpu: bool) -> Any:
    _, after = specs_of(gain, cpu)
    marks = [pytest.mark.expects_inactive(*gain.inactive)] if gain.inactive else []
    # Its name, and what is on after the step: -k finds either.
    return pytest.param(gain, id=f"{gain.name}-{after.id}", marks=marks)


def _case(rung: Rung) -> Any:
    marks = [pytest.mark.rung(number=rung.number), *_oom(oom_below_gib(rung.spec))]
    if rung.published:
        marks.append(pytest.mark.reference(**rung.published))
    if rung.inactive:
        marks.append(pytest.mark.expects_inactive(*rung.inactive))
    return pytest.param(rung, id=rung.spec.id, marks=marks)


def _fine_tuning(case: FineTuning) -> Any:
    marks = _oom(case.oom_below_gib)
    return pytest.param(case, id=case.spec.id, marks=marks)


def _family(family: Family) -> Any:
    marks = [pytest.mark.expects_inactive(*family.inactive)] if family.inactive else []
    return pytest.param(family, id=family.spec.id, marks=marks)


def _text_case(case: TextCase) -> Any:
    marks = [pytest.mark.expects_inactive(*case.inactive)] if case.inactive else []
    if case.published is not None:
        source = "lab 10, MareNostrum 5 (H100 64 GB)"
        marks.append(pytest.mark.reference(source=source, tokens_per_second_per_gpu=case.published))
    return pytest.param(case, id=case.spec.id, marks=marks)


def _width(width: Width) -> Any:
    marks = [*_oom(oom_below_gib(width.spec))]
    if width.published:
        memory = width.published.peak_reserved_bytes
        marks.append(pytest.mark.rung(number="15.10"))
        marks.append(
            pytest.mark.reference(
                source=width.published.source,
                tokens_per_second_per_gpu=width.published.tokens_per_second_per_gpu,
                peak_reserved_gib=None if memory is None else memory / GIB,
            )
        )
    if width.at_least is not None:
        marks.append(pytest.mark.perf_scaling(efficiency_at_least=width.at_least))
    if width.inactive:
        marks.append(pytest.mark.expects_inactive(*width.inactive))
    return pytest.param(width, id=width.spec.id, marks=marks)


def _specs(on_gpu: Sequence[TrainSpec], on_ranks: Sequence[TrainSpec]) -> Callable[[bool], list[Any]]:
    return lambda cpu: [pytest.param(spec, id=spec.id) for spec in (on_ranks if cpu else on_gpu)]


def _widths(on_gpu: Sequence[Width], on_ranks: Sequence[Width]) -> Callable[[bool], list[Any]]:
    return lambda cpu: [_width(width) for width in (on_ranks if cpu else on_gpu)]


#: What a test asks for by name, and its cases, on a CPU or not.
_CASES: Mapping[str, Callable[[bool], list[Any]]] = {
    "gain": lambda cpu: [_gain(gain, cpu) for gain in GAINS if gain.cpu_bounds or not cpu],
    "optimisation": lambda cpu: [_optimisation(one) for one in (OPTIMISATIONS_ON_CPU if cpu else OPTIMISATIONS)],
    "largest": lambda _: [pytest.param(spec, id=spec.capacity_id) for spec in CAPACITIES],
    "rung": lambda cpu: [_case(rung.on_cpu() if cpu else rung) for rung in LADDER],
    "fine_tuning": lambda cpu: [_fine_tuning(one) for one in (FINE_TUNING_ON_CPU if cpu else FINE_TUNING)],
    "long_context": lambda cpu: [_fine_tuning(one) for one in (LONG_CONTEXT_ON_CPU if cpu else LONG_CONTEXT)],
    "family": lambda cpu: [_family(one.on_cpu() if cpu else one) for one in FAMILIES],
    "text_case": lambda cpu: [_text_case(one) for one in (REAL_DATA_ON_CPU if cpu else REAL_DATA)],
    "made_small": _specs(PARITY, PARITY_ON_CPU),
    "weak": _widths(WEAK, WEAK_ON_CPU),
    "strong": _widths(STRONG, STRONG_ON_CPU),
    "sharded": _widths(SHARDED, SHARDED_ON_CPU),  # on a CPU accelerate does not shard, and DeepSpeed does
}
