"""Where the time of a run went, in a line for all launches and in one for each of the longest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pytest_llmperf.records import failure as names
from pytest_llmperf.records.failure import total
from pytest_llmperf.records.result import CaseResult, Spent
from pytest_llmperf.support import formats

#: What phases are called where a whole run is told of; several may be one thing to whoever waits.
_OF_A_RUN = {
    **dict.fromkeys((names.START, names.IMPORTS, names.MODEL), "start-up"),
    names.CALIBRATION: "calibration",
    names.FIRST_STEP: "first steps",
    names.STEPS: "training",
    names.CHECKPOINT: "checkpoints",
    names.TRACE: "tracing",
    names.INSPECTION: "inspection",
    names.END: "ending",
    names.WAITING: "waiting for hardware",
    names.SEARCHING: "searching",
    names.COMPARING: "comparing with plain forms",
    names.FAILED: "failed launches",
    names.OTHER: "other",
}

_Part = tuple[str, float]

# Of the whole; less is left out.
_NEGLIGIBLE = 0.01


def time_line(spent: Spent) -> str:
    """``364 s in 12 launches: 240 s start-up, 105 s training, 19 s waiting for hardware``; the largest part first.

    Without its parts where nothing is known of them; empty where nothing was launched.
    """
    if not spent.launches:
        return ""
    parts = parts_of_a_run(spent.phases)
    line = f"{formats.seconds(spent.seconds)} in {spent.launches} {'launch' if spent.launches == 1 else 'launches'}"
    told = _worth_telling(sorted(parts.items(), key=lambda part: -part[1]))
    return f"{line}: {_listed(told)}" if any(name != _OF_A_RUN[names.OTHER] for name, _ in told) else line


def parts_of_a_run(phases: Mapping[str, float]) -> dict[str, float]:
    """Seconds by what ``phases`` are to whoever waits for a run."""
    parts: dict[str, float] = {}
    for phase, seconds in phases.items():
        name = _OF_A_RUN.get(phase, phase)
        parts[name] = parts.get(name, 0.0) + max(0.0, seconds)
    return parts


def longest_lines(results: Sequence[CaseResult], most: int) -> list[str]:
    """The launches that took longest, so many ``most`` (0: all), each with its phases in their order."""
    launches = [
        (result.id, launch.phases)
        for result in results
        # Without those that another test tells of too.
        for launch in (*result.launches_before, *result.launches[result.shared_launches :])
        if launch.phases
    ]
    if not launches:
        return []
    longest = sorted(launches, key=lambda named: -total(named[1]))[: most or None]
    lines = [f"slowest {len(longest)} of {len(launches)} launches:"]
    for name, phases in longest:
        parts = _worth_telling([(phase.replace("_", " "), seconds) for phase, seconds in phases.items()])
        lines.append(f"  {formats.seconds(total(phases))}  {name}: {_listed(parts)}")
    return lines


def _worth_telling(parts: Sequence[_Part]) -> list[_Part]:
    whole = sum(seconds for _, seconds in parts)
    return [(name, seconds) for name, seconds in parts if seconds > 0 and seconds >= _NEGLIGIBLE * whole]


def _listed(parts: Iterable[_Part]) -> str:
    return ", ".join(f"{formats.seconds(seconds)} {name}" for name, seconds in parts)
