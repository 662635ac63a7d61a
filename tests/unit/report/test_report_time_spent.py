"""Where the time of a run went, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_llmperf.records.result import CaseResult, Spent
from pytest_llmperf.report.summary_table import summary_lines, time_line
from tests.golden import Golden
from tests.unit.report.test_report_failure import launch_of

PHASES = {
    "waiting_for_hardware": 19.0,
    "start": 60.0,
    "imports": 170.0,
    "model": 10.0,
    "first_step": 25.0,
    "steps": 70.0,
    "end": 10.0,
}


def case(name: str, *seconds: float, **changes: object) -> CaseResult:
    """With a launch that trained for each of ``seconds``."""
    launches = tuple(replace(launch_of(), phases={"start": 1.0, "steps": each}) for each in seconds)
    result = CaseResult(
        id=name, digest="d", nodeid=f"t.py::{name}", machine="h200", verdict="pass", reason="", launches=launches
    )
    return replace(result, **changes)  # type: ignore[arg-type]


class TestOfARun:
    def test_the_largest_part_comes_first(self, golden: Golden) -> None:
        golden(time_line(Spent(launches=12, phases=PHASES)))

    def test_what_left_no_record_has_a_part_too(self, golden: Golden) -> None:
        spent = Spent(launches=3, phases={"failed_launches": 30.0, "searching": 50.0, "other": 10.0, "trace": 10.0})
        golden(time_line(spent))

    def test_what_is_negligible_is_left_out(self, golden: Golden) -> None:
        spent = Spent(launches=1, phases={"waiting_for_hardware": 0.003, "imports": 0.0, "start": 0.9, "steps": 100.0})
        golden(time_line(spent))

    @pytest.mark.parametrize("waited", [0.0, 0.004])
    def test_where_nothing_is_known_the_sum_stands_alone(self, waited: float) -> None:
        spent = Spent(launches=2, phases={"waiting_for_hardware": waited, "other": 20.0})
        assert time_line(spent) == "20 s in 2 launches"

    def test_without_a_launch_there_is_nothing_to_tell(self) -> None:
        assert time_line(Spent()) == time_line(Spent(phases={"searching": 3.0})) == ""

    def test_it_stands_beside_the_verdicts_and_without_them(self) -> None:
        spent = Spent(launches=2, phases={"start": 4.0, "steps": 6.0})
        line = "10 s in 2 launches: 6 s training, 4 s start-up"
        assert summary_lines([case("a", 1.0)], None, color=False, spent=spent)[-1] == f"1 pass · {line}"
        assert summary_lines([], None, color=False, spent=spent) == [line]

    def test_runs_are_added(self) -> None:
        both = Spent(launches=1, phases={"start": 4.0}, gpu_seconds=3.0) + Spent(
            launches=2, phases={"start": 1.0, "steps": 6.0}
        )
        assert both == Spent(launches=3, phases={"start": 5.0, "steps": 6.0}, gpu_seconds=3.0)
        assert both.seconds == 11.0
