"""Phases: where the seconds of a launch went, and those of a whole run. Pure.

The launcher's monotonic clock says how long a launch took; where in that a phase ended and the next began is told by
rank 0, by the wall clock: the hosts of a job have that one in common, and each a monotonic one of its own. Where a host
is some seconds off, or its clock is set meanwhile, a boundary moves by as much, and never beyond the launch's ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise

#: Until its hardware was free. The only phase before the launch itself, and no part of its ``wall_seconds``.
WAITING = "waiting_for_hardware"
#: From the request to rank 0's first line: interpreters, or what is left of a fork server's imports; torchrun; on
#: several nodes their meeting.
START = "start"
#: torch, the Trainer and what both import; nothing of it where the launch is warm.
IMPORTS = "imports"
#: What the GPU gives to work that does not depend on what is under test, where that was not measured yet that day.
CALIBRATION = "calibration"
#: Until the first step, without the calibration: CUDA, process group, canary, the model and what is wrapped around it.
MODEL = "model"
#: Compilation, autotuning and the allocator's growth among it.
FIRST_STEP = "first_step"
#: All others, to the end of the device's work.
STEPS = "steps"
#: The Trainer's own save, where the spec asks for one: after the timed steps, and before those that are traced.
CHECKPOINT = "checkpoint"
#: Steps that are traced, after those that are timed.
TRACE = "trace"
#: One more, that is looked at to see whether training learns.
INSPECTION = "inspection"
#: Evidence, the record, the end of all processes; what of it comes before the traced steps, too.
END = "end"

#: What else a run spends, and no record has: on launches that left none, on looking for the largest micro-batch in one
#: process and in predictions, on small trainings beside the plain form, and what nobody told of.
FAILED, SEARCHING, COMPARING, OTHER = "failed_launches", "searching", "comparing", "other"

#: Those that baselines keep of a launch, and hold later ones against; the others are the machine's, or are metrics.
HELD = (START, IMPORTS, MODEL, CHECKPOINT)

# By what rank 0 says that it does, in that order; where its first step ends is told by its clock.
_BEGUN = {
    "importing": IMPORTS,
    "building": MODEL,
    "calibrating": CALIBRATION,
    "assembling": MODEL,
    "training": FIRST_STEP,
    "saving": CHECKPOINT,
    "gathering": END,
    "tracing": TRACE,
    "inspecting": INSPECTION,
    "finishing": END,
}

_DECIMALS = 3
# Less is what rounding leaves.
_ROUNDED = 0.01


def phases_of(
    began: float, seconds: float, reached: Mapping[str, float], first_step_seconds: float
) -> dict[str, float]:
    """The phases of a launch that ``began`` then and took ``seconds``; none where rank 0 told nothing.

    ``reached``: when it began to do what, in seconds since 1970 as ``began`` is. Whatever that says, no phase is
    negative, and they add up to ``seconds``; all are rounded to milliseconds.
    """
    told = [(name, reached[word] - began) for word, name in _BEGUN.items() if word in reached]
    if not told:
        return {}
    begins = [(START, 0.0)]
    for (name, at), (_, after) in pairwise([*told, ("", seconds)]):
        begins.append((name, at))
        if name == FIRST_STEP:
            begins.append((STEPS, min(at + first_step_seconds, after)))
    # Neither before the phase that comes first, nor after the end.
    marks = accumulate((min(at, seconds) for _, at in [*begins, ("", seconds)]), max)
    spans = pairwise(round(mark, _DECIMALS) for mark in marks)
    phases: dict[str, float] = {}
    for (name, _), (begin, end) in zip(begins, spans, strict=True):
        phases[name] = round(phases.pop(name, 0.0) + end - begin, _DECIMALS)  # where it is for the last time
    return phases


def accounted(record: Mapping[str, float], waited: float, seconds: float, remainder: str) -> dict[str, float]:
    """Return a launch's part of a run's sum: the phases of its ``record``, if it left one; as ``remainder`` the rest.

    It had ``waited`` for its hardware and held it for ``seconds``, those of attempts that left no record among them.
    """
    known = {WAITING: waited, **record}
    rest = seconds + known[WAITING] - total(known)
    return {**known, remainder: rest} if rest > _ROUNDED else known


def total(phases: Mapping[str, float]) -> float:
    """All of them together."""
    return sum(phases.values())


def summed(several: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Phase by phase."""
    sums: dict[str, float] = {}
    for phases in several:
        for name, seconds in phases.items():
            sums[name] = sums.get(name, 0.0) + seconds
    return sums
