"""What a run fails for, and a strict one: it is derived in one place."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from pytest_llmperf.records.result import VERDICTS, CaseResult, Check, Verdict, verdict_fails
from tests.fakes import launch_of
from tests.gpu_nights import spec_of

SPEED = Check(metric="step_seconds", value=1.06, unit="s", change=0.06, low=0.01, high=0.1, verdict="inconclusive")
OWN = replace(SPEED, by_itself=0.08)


def result(verdict: Verdict, *checks: Check, changed: tuple[str, ...] = ()) -> CaseResult:
    return CaseResult(
        id="a", digest="d", nodeid="t.py::t", machine="m", verdict=verdict, reason="", checks=checks, changed=changed
    )


@pytest.mark.parametrize("verdict", VERDICTS)
def test_a_strict_run_fails_for_all_that_did_not_pass(verdict: Verdict) -> None:
    fails = (verdict in ("invalid", "regressed", "new"), verdict != "pass")
    for strict, is_over in product((False, True), (False, True)):
        expected = fails[strict]
        assert verdict_fails(verdict, strict=strict) is expected
        assert result(verdict).fails(strict=strict, is_over=is_over) is expected
        assert replace(result(verdict), updated="recorded").fails(strict=strict) is False


def test_what_changed_beside_a_pass_fails_a_strict_run() -> None:
    assert result("pass", changed=("dropout: 0 -> 0.1",)).fails(strict=True)
    assert not result("pass", changed=("dropout: 0 -> 0.1",)).fails(strict=False)


@pytest.mark.parametrize(
    ("check", "fails"),
    [
        (OWN, False),
        (replace(OWN, change=-0.2), False),
        (replace(OWN, change=0.081), True),
        (replace(OWN, change=0.2, higher_is_better=True), False),
        (replace(OWN, change=-0.081, higher_is_better=True), True),
        (SPEED, True),
    ],
)
def test_a_speed_fails_by_more_than_it_does_by_itself(check: Check, fails: bool) -> None:
    assert result("inconclusive", check).fails(strict=True) is fails
    assert not result("inconclusive", check).fails(strict=True, is_over=False)
    assert not result("inconclusive", check).fails(strict=False)


MEMORY = Check(metric="peak_reserved_bytes", value=1.0, unit="bytes", verdict="inconclusive")


@pytest.mark.parametrize(
    "open_beside",
    [
        result("inconclusive", OWN, MEMORY),
        result("inconclusive", OWN, replace(MEMORY, verdict="changed")),
        result("inconclusive", OWN, changed=("loss: 1 -> 2",)),
        replace(result("inconclusive", OWN), launches_before=(launch_of(spec_of(0)),)),
        result("inconclusive"),
        result("regressed", replace(OWN, verdict="regressed")),
    ],
    ids=["memory", "a count", "evidence", "turns", "no check", "a loss"],
)
def test_whatever_else_is_open_fails_as_before(open_beside: CaseResult) -> None:
    assert open_beside.fails(strict=True)
    assert open_beside.fails(strict=True, is_over=False)
