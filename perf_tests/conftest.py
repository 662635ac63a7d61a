"""Turns the ladder's data into parametrized cases, for the machine at hand."""

from __future__ import annotations

from typing import Any

import pytest

from perf_tests.gains import GAINS, Gain, specs_of
from perf_tests.ladder import CARD_GIB, LADDER, Rung
from pytest_llmperf.plugin.session import SESSION


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return True if SESSION not in config.stash else None  # -p no:llmperf: there is nothing to run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "gain" in metafunc.fixturenames:
        cpu = metafunc.config.stash[SESSION].on_cpu
        metafunc.parametrize("gain", [_gain(gain, cpu) for gain in GAINS])
    if "rung" in metafunc.fixturenames:
        on_cpu = metafunc.config.stash[SESSION].on_cpu
        rungs = [rung.on_cpu() if on_cpu else rung for rung in LADDER]
        metafunc.parametrize("rung", [_case(rung) for rung in rungs])


def _gain(gain: Gain, cpu: bool) -> Any:
    before, after = specs_of(gain, cpu)
    marks = [pytest.mark.expects_inactive(*gain.inactive)] if gain.inactive else []
    # Named by what is on after the step; two gains may share it.
    return pytest.param(gain, id=f"{gain.name}-{after.id}" if cpu else f"{after.id}-over-{before.id}", marks=marks)


def _case(rung: Rung) -> Any:
    marks = [pytest.mark.rung(number=rung.number)]
    if rung.published:
        marks.append(pytest.mark.reference(**rung.published))
    if rung.oom_on_the_card:
        marks.append(pytest.mark.expects_oom(below_gib=CARD_GIB + 1))
    if rung.inactive:
        marks.append(pytest.mark.expects_inactive(*rung.inactive))
    return pytest.param(rung, id=rung.spec.id, marks=marks)
