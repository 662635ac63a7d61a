"""Numerics: whether a launch learns what its baseline's launches learnt, loss by loss. Pure.

What is trained is a function of the spec alone, so under one seed the first loss is the same in every process, but
where a compiler tries kernels and keeps the fastest. Later losses follow gradients, whose sums a GPU adds up in another
order each time. docs/explanation/verdicts/exact.md has what was measured of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import Check

# Nine digits tell all values of float32 apart, and a file keeps as many.
_LAST_DIGIT = 5e-9

# Nats, of 12. One compiled training in ten was seen to begin 0.00003 apart on two hosts.
_FIRST_COMPILED = 1e-4

# How far apart losses after the first were seen on H200 (nats, of 12): 0.0018 in 16 and 32 bits, 0.0051 in fp8, between
# launches of one spec that shared their data, over up to 45 steps. Three times that is a change. A CPU's are equal to
# the digit; one in a hundred thousand is none of its noise.
_LATER, _LATER_FP8, _LATER_CPU = 0.0055, 0.016, 1e-5

# A training that its baseline saw scatter by more is given that.
_SCATTER = 3.0


def changed_losses(launches: Sequence[Launch], reference: Sequence[Launch]) -> Iterator[str]:
    """``numerics changed at step 1: 12.178590 -> 12.180114``, of the first step that did, in the first such launch."""
    for launch in launches:
        known = [each for each in reference if _are_comparable(launch, each)]
        line = _first_change(launch, known) if known else None
        if line:
            yield line
            return


# Nothing that leaves a training as it is moves its first loss by so much; another kernel was seen to move it by a
# hundredth of that. Beside it, how many times what the baseline's own launches scatter.
_LOST, _LOST_SCATTER = 1e-3, 10.0


def first_loss_checks(
    launches: Sequence[Launch], reference: Sequence[Launch], gradient_accumulation_steps: int
) -> tuple[Check, ...]:
    """A check that fails where no launch begins near the loss of ``reference``, with the same data and versions.

    With other versions it fails for a multiple that accumulation or ranks explain: no upgrade is meant to do that.
    """
    known = [each for each in reference if each.losses and launches and _are_comparable(launches[-1], each)]
    firsts = [each.losses[0] for each in known]
    values = [launch.losses[0] for launch in launches if launch.losses]
    if not firsts or not values:
        return ()
    # Of launches that differ, which should not be, the mildest.
    then, now = min(((then, now) for then in firsts for now in values), key=lambda pair: abs(pair[1] - pair[0]))
    limit = max(_LOST * abs(then), _LOST_SCATTER * (max(firsts) - min(firsts)))
    ratio = _named_ratio(now / then if then else 0.0, gradient_accumulation_steps, len(launches[-1].ranks))
    if abs(now - then) <= limit or not (ratio or _same_versions(launches[-1], known[-1])):
        return ()
    check = Check(
        metric="first_loss",
        value=now,
        unit="1",
        baseline=then,
        tolerance=_LOST,
        limit=then + math.copysign(limit, now - then),
        change=now / then - 1 if then else None,
        verdict="regressed",
        detail=ratio,
    )
    return (check,)


def _named_ratio(ratio: float, accumulation: int, ranks: int) -> str:
    """What ``ratio`` is, where a loss that is divided or summed once too often has it."""
    names = {"gradient_accumulation_steps": accumulation, "the number of ranks": ranks}
    if min(names.values()) > 1:
        names["gradient_accumulation_steps times ranks"] = accumulation * ranks
    for number in sorted(set(names.values())):
        for factor, words in ((float(number), f"{number} times"), (1 / number, f"1/{number} of")):
            if number > 1 and abs(ratio / factor - 1) <= _LOST:
                those = " and also ".join(name for name, each in names.items() if each == number)
                return f"{words} the baseline's: {number} is {those}, the loss is normalised otherwise"
    return ""


def _same_versions(a: Launch, b: Launch) -> bool:
    mine, theirs = a.environment.versions, b.environment.versions
    return all(mine[name] == theirs[name] for name in {*mine} & {*theirs} - {"python", "numpy"})


def _are_comparable(a: Launch, b: Launch) -> bool:
    """Whether both drew the same samples in the same order, and did their sums on the same kind of hardware."""
    return _terms(a) == _terms(b) and _terms(a)[0] is not None


def _terms(launch: Launch) -> tuple[object, ...]:
    setup = launch.evidence.get("setup", {})
    torch = setup.get("torch", {})
    return setup.get("samples"), launch.environment.gpu, torch.get("threads"), torch.get("cpu_capability")


def _first_change(launch: Launch, known: Sequence[Launch]) -> str | None:
    scatter = 0.0
    for index, loss in enumerate(launch.losses):
        stored = [each.losses[index] for each in known if index < len(each.losses)]
        if not stored:
            return None
        # The first is exact: of several, it is one of them.
        scatter = max(scatter, max(stored) - min(stored)) if index else 0.0
        slack = max(_least_slack(launch, index), _SCATTER * scatter)
        if not any(abs(loss - each) <= slack for each in stored):  # also true of NaN
            then, now = _told_apart(stored[-1], loss)
            return f"numerics changed at step {index + 1}: {then} -> {now}"
    return None


def _least_slack(launch: Launch, index: int) -> float:
    is_compiled = bool(launch.evidence.get("compiled_graphs") or launch.evidence.get("torch_compile"))
    if index == 0:
        return _FIRST_COMPILED if is_compiled else _LAST_DIGIT * abs(launch.losses[0])
    if not launch.environment.driver:
        return _FIRST_COMPILED if is_compiled else _LATER_CPU
    return _LATER_FP8 if launch.evidence.get("fp8_modules") else _LATER


def _told_apart(then: float, now: float) -> tuple[str, str]:
    """Both with six decimals, or with as many more as it takes."""
    decimals = next((places for places in (6, 7, 8) if f"{then:.{places}f}" != f"{now:.{places}f}"), 9)
    return f"{then:.{decimals}f}", f"{now:.{decimals}f}"
