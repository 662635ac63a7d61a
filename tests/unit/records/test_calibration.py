"""A calibration as data: what it says of itself, what is refused, and its JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.records.calibration import Calibration
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec
from tests.fakes import launch_of
from tests.golden import Golden

MADE = Calibration(
    made_at="2026-01-01T12:00:00Z",
    seconds={"bf16_product": 0.0015, "copy": 0.0005},
    versions={"torch": "2.13.0", "driver": "580.82.07", "cuda": "13.0"},
    sm_clock_mhz=1500.0,
    power_watts=690.5,
    temperature_celsius=61.0,
    power_limit_watts=700.0,
)

_figures = st.floats(0, 1e6)


@given(
    st.builds(
        Calibration,
        made_at=st.datetimes().map(lambda at: at.isoformat(timespec="seconds") + "Z"),
        seconds=st.dictionaries(st.text(), st.floats(1e-9, 1e3), min_size=1),
        versions=st.dictionaries(st.text(), st.text()),
        sm_clock_mhz=_figures,
        power_watts=_figures,
        temperature_celsius=_figures,
        power_limit_watts=_figures,
        trouble=st.text(),
    )
)
def test_what_is_written_is_read_back(made: Calibration) -> None:
    assert codec.read(Calibration, json.loads(json.dumps(codec.plain(made)))) == made
    record = launch_of(TrainSpec(model="llama-tiny", gpus=2, steps=4, warmup_steps=1, min_steps=2))
    one, two = record.ranks
    with_one = replace(record, ranks=(replace(one, calibration=made), two))
    values = codec.plain(with_one)
    assert ["calibration" in rank for rank in values["ranks"]] == [True, False]
    assert codec.read(Launch, json.loads(json.dumps(values))) == with_one


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seconds": {}}, "no seconds of any work"),
        ({"seconds": {"copy": 0.0}}, "'copy' at 0.0 s"),
        ({"seconds": {"copy": -1.0}}, "'copy' at -1.0 s"),
        ({"seconds": {"copy": float("nan")}}, "'copy' at nan s"),
        ({"seconds": {"copy": float("inf")}}, "'copy' at inf s"),
        ({"seconds": {"copy": "fast"}}, "seconds 'copy' is \"fast\", expected a number"),
        ({"power_watts": float("nan")}, "power_watts nan"),
        ({"sm_clock_mhz": -1.0}, "sm_clock_mhz -1.0"),
        ({"made_at": "yesterday"}, "made at 'yesterday', expected a time in UTC"),
        ({"made_at": 7}, "made_at is 7, expected text"),
        ({"versions": {"torch": None}}, "versions 'torch' is null, expected text"),
        ({"trouble": None}, "trouble is null, expected text"),
        ({"more": 1}, "has 'more', which is unknown"),
    ],
)
def test_what_is_none_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        codec.read(Calibration, {**codec.plain(MADE), **change})


@pytest.mark.parametrize("missing", ["made_at", "seconds", "versions"])
def test_what_lacks_a_part_is_refused(missing: str, golden: Golden) -> None:
    values = {name: value for name, value in codec.plain(MADE).items() if name != missing}
    with pytest.raises(ValueError, match="calibration has no") as raised:
        codec.read(Calibration, values)
    golden(raised)


def test_who_made_it_is_said_in_one_order() -> None:
    shuffled = replace(MADE, versions=dict(sorted(MADE.versions.items(), reverse=True)))
    assert shuffled.maker == MADE.maker == "cuda 13.0, driver 580.82.07, torch 2.13.0, procedure 1"
    assert replace(MADE, versions={**MADE.versions, "driver": "590"}).maker != MADE.maker


def test_a_copy_calls_no_library_and_stays_comparable() -> None:
    upgraded = replace(MADE, versions={"torch": "9.9", "driver": "999"})
    assert upgraded.maker_of("copy") == MADE.maker_of("copy") == "procedure 1"
    assert upgraded.maker_of("bf16_product") != MADE.maker_of("bf16_product") == MADE.maker
    assert replace(MADE, procedure=2).maker_of("copy") != MADE.maker_of("copy")


def test_what_another_procedure_measured_is_told_apart_and_files_of_the_first_do_not_say_it() -> None:
    another = replace(MADE, procedure=2)
    assert another.maker != MADE.maker
    assert codec.read(Calibration, codec.plain(another)) == another
    assert "procedure" not in codec.plain(MADE)
    assert codec.read(Calibration, codec.plain(MADE)) == MADE
