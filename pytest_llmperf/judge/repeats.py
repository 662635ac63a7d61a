"""Repeats: what of a user's own training was the same in all launches that recorded it, and so is exact of it. Pure.

Nobody knows beforehand what of a script repeats, so it is found out (decision 69). What did is held without tolerance
by the same versions and hardware. Of the rest counts are held as a range, losses as a band, memory as of any case."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from statistics import fmean, variance
from typing import TypeAlias

from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import METRICS
from pytest_llmperf.records.result import Check
from pytest_llmperf.records.trace import COUNTED, Trace
from pytest_llmperf.support import codec

# Beyond a range: by more than so many of its widths, and by more than so much of it. Of two launches a third is outside
# of their range two times in three, and beyond this once in ten; a range grows with each launch that is accepted.
_WIDTHS, _SHARE = 2.0, 0.1
_NOT_ONE_A_STEP = 0.9
# Beyond a band of losses, which is around the means of launches over their last halves: so many standard deviations of
# one step's loss between them, and so much of the loss at least.
_DEVIATIONS, _LEAST = 8.0, 1e-3
# A file keeps nine digits of a loss, which tell all values of float32 apart.
_SAME_LOSS = 5e-9
# Another kernel, or a loss that is rounded to bf16 no more, moves the first loss of a training by no more than this.
_ROUNDING = 2**-8
# Of other samples by so much: a batch that is split otherwise draws others, and one that is made once stays as it is.
_OTHER_SAMPLES = 0.05
# A sum over ranks of steps that are unlike is this far from a whole number.
_FRACTION = 1e-3

Launches: TypeAlias = Sequence[Launch]
Losses: TypeAlias = Sequence[float]


@codec.sparse("launches", "losses")
@dataclass(frozen=True, kw_only=True)
class Repeats:
    launches: int
    losses: int | None
    """The first steps, all of which had the same loss: all of them, or the first at most; ``None``: nobody knows."""
    counts: tuple[str, ...] = ()
    """The metrics of a traced step that were the same, by name."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Of its other metrics the least and the most."""
    tokens: bool = False
    """Whether each step had as many."""
    memory: tuple[tuple[int, ...], ...] = ()
    """Of each rank what tensors held at most, and after each step; empty where that was not the same."""

    @classmethod
    def of(cls, new: Launches, old: Repeats | None = None, stored: Launches = (), kept: Trace | None = None) -> Repeats:
        """What ``new`` launches and those that are ``stored``, of which ``old`` and one trace tell, have in common."""
        everyone = (*stored, *new)
        are_several = len(everyone) > 1
        traces = [trace for trace in (kept, *(one.trace for one in new)) if trace]
        losses = _same_losses(everyone) if all(one.losses for one in everyone) else None
        steps = min(len(one.step_seconds) for one in everyone)
        counts, ranges = list[str](), {**old.ranges} if old else dict[str, tuple[float, float]]()
        for metric in (one for one in COUNTED if traces and all(one in trace.metrics for trace in traces)):
            told = [trace.count(metric) for trace in traces]
            same = len(traces) > 1 and all(named(metric, trace) == named(metric, traces[0]) for trace in traces)
            # Steps that are unlike, in a training that begins otherwise each time, have as many by chance alone. One
            # that begins alike and logs each tenth step does not.
            counted = (count * trace.ranks for trace in traces for count in trace.counts.values())
            is_chance = not losses and any(abs(count - round(count)) > _FRACTION for count in counted)
            known = ranges.pop(metric, (told[0], told[0]))
            if same and known == (told[0], told[0]) and not is_chance:  # a range of one trace alone is none
                counts.append(metric)
            else:
                ranges[metric] = min(*known, *told), max(*known, *told)
        memory = {_memory(one, steps) for one in new}
        memory |= {tuple(rank[: steps + 1] for rank in old.memory)} if old else set()
        return cls(
            launches=(old.launches if old else 0) + len(new),
            losses=losses,
            counts=tuple(counts),
            ranges=ranges,
            tokens=are_several and len({_tokens(one, steps) for one in everyone}) == 1,
            memory=memory.pop() if are_several and len(memory) == 1 else (),
        )

    def words(self, launches: Launches) -> str:
        """``held exactly: kernels, tokens of each step; as a band: losses``."""
        words = {one: one.removesuffix("_per_step").replace("collective_bytes", "their bytes") for one in COUNTED}
        exact, band = ([words[one] for one in those] for those in (self.counts, self.ranges))
        exact += ["memory after each step"] * bool(self.memory) + ["tokens of each step"] * self.tokens
        is_whole = self.losses == min(len(one.losses) for one in launches)
        exact += ["losses" if is_whole else f"losses up to step {self.losses}"] if self.losses else []
        band += ["losses"] if self.losses is not None and not is_whole else []
        told = {"held exactly": exact, "as a band": band, "not claimed": ["losses"] if self.losses is None else []}
        return "; ".join(f"{how}: {', '.join(those)}" for how, those in told.items() if those)

    def count_check(self, metric: str, told: Sequence[float]) -> Check | None:
        """The check of a count that did not repeat; ``None`` of one that did."""
        if metric not in self.ranges:
            return None
        (low, high), value = self.ranges[metric], min(told)
        row, most = METRICS[metric], high + max(_WIDTHS * (high - low), _SHARE * high)
        # Whatever a launch begins from, one wait more in each step is no chance where all launches had as many.
        is_costly = row.costly and row.unit != "bytes" and low == high
        most = min(most, high + _NOT_ONE_A_STEP) if is_costly else most
        return row.check(
            value,
            high,
            limit=most,
            verdict="pass" if value <= most else "regressed" if is_costly else "changed",
            detail=f"{low:g} to {high:g} in {self.launches} launches that were not alike",
        )

    def changes(self, launches: Launches, stored: Launches) -> Iterator[str]:
        """A line for each thing that is in none of ``launches`` as in those that are ``stored``."""
        newest = stored[-1]
        if self.losses is not None and not any(one.losses for one in launches):
            yield "losses: known -> unknown, since backward does not begin with one number any more"
        comparable = [one for one in launches if _are_alike(one, newest)]
        exact = [_first_other(one.losses, newest.losses, self.losses or 0) for one in comparable]
        if exact and all(exact):
            yield "loss of step {}: {:.9g} -> {:.9g}".format(*max(filter(None, exact)))
        elif self.losses is not None and self.losses < min(len(one.losses) for one in stored):
            yield from _beyond_band(launches, stored)
        if not comparable:
            return
        steps = min(len(one.step_seconds) for one in (*comparable, newest))
        if self.tokens and all(_tokens(one, steps) != _tokens(newest, steps) for one in comparable):
            yield f"tokens of each step: {newest.tokens_per_step} -> {comparable[-1].tokens_per_step} (mean)"
        apart = [_first_bytes(self.memory, _memory(one, len(one.step_seconds))) for one in comparable]
        if all(apart):
            yield "{}: {} -> {} bytes".format(*max(filter(None, apart)))

    def is_chance(self, launches: Launches, stored: Launches, *, are_counts_other: bool) -> bool:
        """Whether all that was held exactly and could differ does, with the same files and versions, from the first
        loss on: a training that begins alike and computes otherwise is no chance."""
        newest = stored[-1]
        varies = self.tokens and bool(newest.step_tokens)
        steps = min(len(one.step_seconds) for one in (*stored, *launches))
        return (are_counts_other or not self.counts) and all(
            one.sources == newest.sources
            and _are_alike(one, newest)
            and bool(self.losses and one.losses)
            and not math.isclose(one.losses[0], newest.losses[0], rel_tol=_ROUNDING)
            and (not varies or _tokens(one, steps) != _tokens(newest, steps))
            for one in launches
        )


def named(metric: str, trace: Trace) -> dict[tuple[str, str], float]:
    """What ``metric`` counts in a step, by kind and name."""
    # A file keeps six digits of a mean over ranks.
    return {key: float(f"{count:.6g}") for key, count in trace.counts.items() if key[0] in COUNTED[metric]}


def _tokens(launch: Launch, steps: int) -> tuple[object, ...]:
    return tuple(rank.step_tokens[:steps] or rank.tokens_per_step for rank in launch.ranks)


def _memory(launch: Launch, steps: int) -> tuple[tuple[int, ...], ...]:
    """Nothing where only the host's memory is known, which is more than tensors hold."""
    if not launch.seen.run.is_on_gpu or not all(rank.allocated_bytes for rank in launch.ranks):
        return ()
    return tuple((rank.peak_allocated_bytes, *rank.allocated_bytes[:steps]) for rank in launch.ranks)


def _same_losses(launches: Launches) -> int:
    """How many of the first losses are the same in all: all, or no more than the first. Where sums are made in any
    order losses part within few steps of rounding, and a later one agrees by chance: of two recordings in one of
    eighteen, whose every night would differ (``tools/script_power.py losses``)."""
    if len(launches) == 1:
        return 0
    firsts = [_first_other(one.losses, launches[0].losses, len(one.losses)) for one in launches]
    if not any(firsts):
        return min(len(one.losses) for one in launches)
    return min(1, *(first[0] - 1 for first in firsts if first))


def _first_other(losses: Sequence[float], then: Sequence[float], most: int) -> tuple[int, float, float] | None:
    pairs = enumerate(zip(losses[:most], then, strict=False), 1)
    others = ((step, old, now) for step, (now, old) in pairs if not math.isclose(now, old, rel_tol=_SAME_LOSS))
    return next(others, None)


def _first_bytes(then: Sequence[Sequence[int]], now: Sequence[Sequence[int]]) -> tuple[str, int, int] | None:
    ranks = (enumerate(zip(before, after, strict=False)) for before, after in zip(then, now, strict=False))
    # The peak of more steps is another's.
    alike = len(then[:1] and then[0]) == len(now[:1] and now[0])
    others = ((step, old, new) for rank in ranks for step, (old, new) in rank if old != new and (step or alike))
    for step, old, new in others:
        return f"memory after step {step}" if step else "peak of allocated memory", old, new
    return None


def _beyond_band(launches: Launches, stored: Launches) -> Iterator[str]:
    """That the mean loss of the last half of the steps is further off than the recordings scatter."""
    known, told = ([one.losses for one in those if one.losses] for those in (stored, launches))
    if not known or not told:
        return
    length = min(map(len, (*known, *told)))
    halves = [losses[length // 2 : length] for losses in known]
    means, now = [fmean(half) for half in halves], [fmean(losses[length // 2 : length]) for losses in told]
    sd = math.sqrt(fmean(map(variance, zip(*halves, strict=True)))) if len(halves) > 1 else 0.0
    slack = max(_DEVIATIONS * sd, _LEAST * abs(fmean(means)))
    low, high = min(means) - slack, max(means) + slack
    if not any(low <= mean <= high for mean in now):
        steps = f"mean loss of the last {len(halves[0])} steps"
        yield f"{steps}: {fmean(means):.6g} -> {now[-1]:.6g}, expected {low:.4g} to {high:.4g}"


def unlike_losses(
    losses: Losses, known: Losses, again: Losses, more: float = 1.0, *, is_same_batch: bool = True
) -> str:
    """How the ``losses`` of a short launch are not those that another configuration of its script is known to have, and
    had again; empty where they are, or where nobody knows. So many times ``more`` tokens a step, or a batch that may be
    put together otherwise, are other samples (decision 77)."""
    if not losses or not known:
        return ""
    repeats = bool(again) and math.isclose(known[0], again[0], rel_tol=_SAME_LOSS)
    is_same_batch = is_same_batch and more == 1
    if repeats and is_same_batch and not math.isclose(losses[0], known[0], rel_tol=_ROUNDING):
        return f"its first loss is {losses[0]:.6g}, expected {known[0]:.6g}"
    mean, usual, *other = (fmean(each[len(each) // 2 :]) for each in (losses, known, again) if each)
    # From step to step, which leaves out what is learnt; fewer tokens scatter by more.
    sd = math.sqrt(fmean((b - a) ** 2 for a, b in pairwise(known)) / 2 * max(1.0, 1 / more))
    apart = max((abs(each - usual) for each in other), default=0.0)
    least = abs(usual) * (_ROUNDING if is_same_batch else _OTHER_SAMPLES)
    slack = max(_DEVIATIONS * sd / math.sqrt(len(known) / 4), _DEVIATIONS * apart, least)
    if abs(mean - usual) <= slack:
        return ""
    steps = f"the mean loss of its last {len(losses) - len(losses) // 2} steps"
    return f"{steps} is {mean:.6g}, expected {usual - slack:.4g} to {usual + slack:.4g}"


def _are_alike(a: Launch, b: Launch) -> bool:
    mine, theirs = ({**one.environment.versions, "python": "", "numpy": ""} for one in (a, b))
    return mine == theirs and _hardware(a) == _hardware(b)


def _hardware(launch: Launch) -> tuple[object, ...]:
    return (launch.environment.gpu, *map(launch.seen.run.torch.get, ("threads", "cpu_capability")))


# Numerics: whether a launch learns what its baseline's launches learnt, loss by loss.

# A norm that another launch of the same weights and samples would not have. Sums in another order move it by less than
# a thousandth in 16 bits; a kernel whose gradient is wrong by more than it should. In fp8 scales follow the data.
_SAME_NORM, _SAME_NORM_FP8 = 0.02, 0.1


def changed_gradients(launches: Launches, reference: Launches) -> Iterator[str]:
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


# Nats, of 12. One compiled training in ten was seen to begin 0.00003 apart on two hosts.
_FIRST_COMPILED = 1e-4
# How far apart losses after the first were seen on H200 (nats, of 12): 0.0018 in 16 and 32 bits, 0.0051 in fp8, between
# launches of one spec that shared their data, over up to 45 steps. Three times that is a change. A CPU's are equal to
# the digit; one in a hundred thousand is none of its noise.
_LATER, _LATER_FP8, _LATER_CPU = 0.0055, 0.016, 1e-5
# A training that its baseline saw scatter by more is given that.
_SCATTER = 3.0


def changed_losses(launches: Launches, reference: Launches) -> Iterator[str]:
    """``numerics changed at step 1: 12.178590 -> 12.180114``, of the first step that did, in the first such launch."""
    comparable = ((launch, [each for each in reference if _are_comparable(launch, each)]) for launch in launches)
    yield from islice(filter(None, (_first_change(launch, known) for launch, known in comparable if known)), 1)


# Nothing that leaves a training as it is moves its first loss by so much; another kernel was seen to move it by a
# hundredth of that. Beside it, how many times what the baseline's own launches scatter.
_LOST, _LOST_SCATTER = 1e-3, 10.0


def first_loss_checks(launches: Launches, reference: Launches, gradient_accumulation_steps: int) -> tuple[Check, ...]:
    """A check that fails where no launch begins near the loss of ``reference``, with the same data and versions. With
    other versions it fails for a multiple that accumulation or ranks explain: no upgrade is meant to do that."""
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
    most = then + math.copysign(limit, now - then)
    return (METRICS["first_loss"].check(now, then, tolerance=_LOST, limit=most, verdict="regressed", detail=ratio),)


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
    mine, theirs = (one.seen.run.setup.get("samples") for one in (a, b))
    return mine is not None and mine == theirs and _hardware(a) == _hardware(b)


def _first_change(launch: Launch, known: Launches) -> str | None:
    scatter = 0.0
    for index, loss in enumerate(launch.losses):
        if not (stored := [each.losses[index] for each in known if index < len(each.losses)]):
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
