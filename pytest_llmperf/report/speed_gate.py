"""What is said where speed is no gate, as on a CPU unless somebody chose a tolerance. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_llmperf.records.result import CaseResult

_RATE = "tokens_per_second_per_gpu"


def wide_gates(results: Sequence[CaseResult]) -> str:
    """A line where a slow-down by a multiple passes; else empty."""
    checks = filter(None, (result.check(_RATE) for result in results))
    return no_gate_of_speed(check.times_slower for check in checks)


def no_gate_of_speed(times: Iterable[float | None]) -> str:
    """Why cases fail only when they are so many ``times`` slower, and what holds there all the same."""
    wide = [each for each in times if each is not None]
    if not wide:
        return ""
    return (
        "CPU: this is no gate of speed: equal runs differ by tens of per cent here, so a case fails only when it is "
        f"{min(wide):.2g} times slower (perf_throughput_tolerance = 0.3 makes that 30 %, on a quiet machine); "
        "held exactly all the same: what was active, what a step runs, the first loss, and that it learns"
    )
