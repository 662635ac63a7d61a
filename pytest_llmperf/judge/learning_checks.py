"""What an inspected step says against a launch: that it does not learn as it should. Pure.

All of it is exact, but for what rounding does to a norm or an update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.learning import OLDER, UNWANTED, Learning
from pytest_llmperf.records.metrics import METRICS
from pytest_llmperf.records.result import USUAL, Check
from pytest_llmperf.settings.train_spec import TrainSpec

# Of a norm of gradients in 16 bits, what rounding each element may do to it; clipping rounds them once.
_CLIPPED = 0.02

# Of a learning rate: float32 has seven digits.
_ROUNDED = 1e-3

# Of an update's bound: optimizer states of 16 bits are rounded in each step. Two updates in place of one are twice it.
_UPDATE = 0.25

# In roundings, how far an element of an update may be from the formula's: twice as many as the formula has operations.
# Up to 4.1 were seen on sound trainings on a CPU and up to 2.5 on an H200 (docs/explanation/learning.md).
_ROUNDINGS = 16

# Of what other tokens change where they stand, what they may change before: nothing, but for rounding.
_FUTURE = 1e-3

# A norm that another launch of the same weights and samples would not have. Sums in another order move it by less than
# a thousandth in 16 bits; a kernel whose gradient is wrong by more than it should. In fp8 scales follow the data.
_SAME_NORM, _SAME_NORM_FP8 = 0.02, 0.1

# Losses that are the same to the last digit that a file keeps: nine tell all values of float32 apart.
_SAME_LOSS = 5e-9

_NAMES = 3


def unlearnt(spec: TrainSpec, launch: Launch) -> Iterator[str]:
    """A line for each thing that a training which learns does not do; none where nothing was looked at."""
    learning, setup = launch.learning, launch.seen.run.setup
    if setup.get("training") is False:
        yield "some modules were in evaluation mode while it trained: their dropout was off"
    tied, asked = setup.get("tied_weights"), setup.get("config", {}).get("tie_word_embeddings")
    if tied is not None and asked is not None and bool(tied) != bool(asked):
        yield f"the configuration has tie_word_embeddings={asked}, and the weights were {'' if tied else 'not '}tied"
    if learning:
        yield from _tensors(learning)
        yield from _step(spec, learning)
        yield from _data(learning)


def notes(launches: Sequence[Launch]) -> Iterator[str]:
    """What is no fault and should be known, of the first launch that shows it; or why nothing is."""
    for why in dict.fromkeys(launch.learning.none for launch in launches):
        if why not in ("", OLDER, UNWANTED):
            yield f"whether it learns was not looked at: {why}"
    for launch in launches:
        learning = launch.learning
        if learning.lost:
            yield (
                f"{learning.lost} of {learning.tensors} tensors did not change in {learning.steps} steps: "
                f"weights kept in 16 bits alone round such updates away (mixed precision keeps 32 bits); {USUAL}"
            )
            return


def _tensors(learning: Learning) -> Iterator[str]:
    steps = learning.steps
    lines = {
        "the optimizer does not hold {}": learning.unheld,
        f"no gradient reached {{}}, which did not move in {steps} steps": learning.unreached,
        f"{{}} did not move in {steps} steps, though a gradient reached them": learning.still,
        "ranks have different gradients of {} after their exchange": learning.differing_gradients,
        f"ranks hold different weights of {{}} after {steps} steps": learning.differing_weights,
    }
    if not learning.tensors:
        yield "no parameter asks for a gradient: nothing is trained"
    yield from (line.format(_named(names, learning)) for line, names in lines.items() if names)


def _step(spec: TrainSpec, learning: Learning) -> Iterator[str]:
    if learning.stale:
        yield f"gradients of {learning.stale} tensors were not zero when a step began"
    if learning.dropped:
        yield f"gradients of {learning.dropped} tensors were lost from one accumulated pass to the next"
    if learning.is_scaled:
        return  # its steps may be skipped, and its gradients are scaled until they are clipped
    yield from _clipping(learning)
    low, high = learning.learning_rates
    if not math.isclose(low, learning.scheduled_rate, rel_tol=_ROUNDED) or low != high:
        seen = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        yield f"the learning rate was {seen}, its schedule says {learning.scheduled_rate:g}"
    if learning.schedule_steps != learning.steps:
        yield f"the schedule made {learning.schedule_steps} steps in {learning.steps} of the optimizer"
    if learning.largest_update > learning.update_bound * (1 + _UPDATE):
        yield (
            f"an update was {learning.largest_update:.3g} learning rates, {spec.optimizer} makes none of more than "
            f"{learning.update_bound:.3g}"
        )
    yield from _update(learning)


def _update(learning: Learning) -> Iterator[str]:
    """What the optimizer did in the inspected step, beside what it was asked to do."""
    replay = learning.replay
    if replay.miscounted:
        low, high = replay.counts
        counted = f"{low}" if low == high else f"{low} to {high}"
        yield (
            f"the optimizer has counted {counted} steps of {_named(replay.miscounted, learning)}, expected "
            f"{learning.steps} each"
        )
    if replay and not replay.roundings <= _ROUNDINGS:
        yield (
            f"the {replay.figure} of {replay.tensor} changed by {replay.found:.4g}, {replay.asked} changes it by "
            f"{replay.expected:.4g} (apart by {replay.roundings:.3g} roundings of that element)"
        )


def _clipping(learning: Learning) -> Iterator[str]:
    if not math.isfinite(learning.gradient_norm):
        yield f"the norm of the gradients of step {learning.steps} is {learning.gradient_norm:g}"
        return
    if not learning.max_norm or not learning.gradient_norm:
        return
    expected = min(1.0, learning.max_norm / learning.gradient_norm)
    low, high = learning.clip_factors
    worst = max((low, high), key=lambda factor: abs(math.log(max(factor, 1e-30) / expected)))
    if not abs(worst / expected - 1) <= _CLIPPED:
        yield (
            f"gradients of norm {learning.gradient_norm:.4g} were multiplied by {worst:.4g} when they were clipped to "
            f"{learning.max_norm:g}, expected {expected:.4g}"
        )


def _data(learning: Learning) -> Iterator[str]:
    shared, foreign, misplaced = learning.shared_samples, learning.foreign_samples, learning.misplaced_samples
    future = learning.future or 0.0
    lines = {
        f"{shared} samples of one step were read more than once: ranks share what they read": shared,
        f"{foreign} samples on the device are none of the data set: a copy changed them (or, of a long one, they are "
        "another step's)": foreign,
        f"{misplaced} samples of step {learning.steps} are another step's in the order of the data set: some are "
        "repeated, skipped or shuffled": misplaced,
        f"the Trainer's sampler does not do what its arguments ask for: {learning.misorder}": learning.misorder,
        "labels are not the inputs, which the model's loss shifts itself": not learning.labels,
        f"what comes later changes what is said before ({future:.2g} of what it changes later): the causal mask is "
        "lost": future > _FUTURE,
    }
    yield from (line for line, holds in lines.items() if holds)


def changed_gradients(launches: Sequence[Launch], reference: Sequence[Launch]) -> Iterator[str]:
    """A line for a launch that begins with the first loss of ``reference``, and not with its gradient."""
    for launch in launches:
        known = [
            each
            for each in reference
            if each.gradient_norms and each.gradient_norms[0] > 0 and each.losses and launch.losses
            if math.isclose(launch.losses[0], each.losses[0], rel_tol=_SAME_LOSS)
        ]
        if not known or not launch.gradient_norms:
            continue
        norm, limit = launch.gradient_norms[0], _SAME_NORM_FP8 if launch.seen.precision.fp8_modules else _SAME_NORM
        if not any(abs(norm / each.gradient_norms[0] - 1) <= limit for each in known):
            yield (
                f"the first gradient has norm {norm:.4g}, the baseline's {known[-1].gradient_norms[0]:.4g} after the "
                f"same first loss {launch.losses[0]:.6f}: gradients are not computed as they were"
            )
            return


def _named(names: Sequence[str], learning: Learning) -> str:
    told = ", ".join(names[:_NAMES]) + (", …" if len(names) > _NAMES else "")
    return f"{len(names)} of {learning.tensors} tensors ({told})"


# Numerics: whether a launch learns what its baseline's launches learnt, loss by loss.

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
    mine, theirs = (one.environment.versions for one in (launches[-1], known[-1]))
    are_same = all(mine[name] == theirs[name] for name in {*mine} & {*theirs} - {"python", "numpy"})
    if abs(now - then) <= limit or not (ratio or are_same):
        return ()
    check = METRICS["first_loss"].check(
        now,
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


def _are_comparable(a: Launch, b: Launch) -> bool:
    """Whether both drew the same samples in the same order, and did their sums on the same kind of hardware."""
    mine, theirs = (
        (one.seen.run.setup.get("samples"), one.environment.gpu, *map(one.seen.run.torch.get, _HARDWARE))
        for one in (a, b)
    )
    return mine == theirs and mine[0] is not None


_HARDWARE = ("threads", "cpu_capability")


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
            then = stored[-1]
            # With six decimals, or with as many more as tell them apart.
            places = next((few for few in (6, 7, 8) if f"{then:.{few}f}" != f"{loss:.{few}f}"), 9)
            return f"numerics changed at step {index + 1}: {then:.{places}f} -> {loss:.{places}f}"
    return None


def _least_slack(launch: Launch, index: int) -> float:
    is_compiled = launch.seen.compilation.is_compiled
    if index == 0:
        return _FIRST_COMPILED if is_compiled else _SAME_LOSS * abs(launch.losses[0])
    if not launch.environment.driver:
        return _FIRST_COMPILED if is_compiled else _LATER_CPU
    return _LATER_FP8 if launch.seen.precision.fp8_modules else _LATER
