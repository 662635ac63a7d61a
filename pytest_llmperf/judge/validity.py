"""Whether a launch may count at all: its arithmetic adds up, what was asked for was active, nobody else was there. What
is found makes a case ``invalid``, before any comparison. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from pytest_llmperf.judge.stats import Experience
from pytest_llmperf.records.calibration import THROTTLES, Health
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.learning import OLDER, Learning
from pytest_llmperf.records.result import USUAL, Check
from pytest_llmperf.records.steady_state import LONGEST_SECONDS, SHORTEST_SECONDS
from pytest_llmperf.records.trace import UNWANTED
from pytest_llmperf.settings.data import is_uneven
from pytest_llmperf.settings.registry import LEARNING, Evidence, contradictions, lost, undeclarable
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.codec import flat

_THROTTLED_SHARE = 0.1
# A canary this far below the middle one of the stored, of at least so many; two launches a minute apart were seen to
# differ by 11 % (clocks are still rising while one runs).
_CANARY_LOSS, _FEWEST_CANARIES = 0.25, 3
# A third's median scatters about 2.4 times as much as the whole's; a drift beyond three times that is none of chance.
_DRIFT_ERRORS = 3 * 2.45


def troubles(spec: Spec, launch: Launch, inactive: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """One line for each reason not to trust ``launch``. ``inactive`` names settings that are declared to change nothing
    (Liger on a model without kernels): where one of them is asked for, it is trouble if it *was* active."""
    found = []
    if launch.digest != spec.digest:
        found.append(f"the record is of other settings (digest {launch.digest}, the spec's is {spec.digest})")
    found += [*unusable(launch), *undeclarable(inactive)]
    if not isinstance(spec, TrainSpec):  # a script's ranks may have been meant to differ
        return tuple(found)
    expected = spec.sequences_per_step * spec.sequence_length
    is_odd = launch.tokens_per_step > expected if is_uneven(spec) else launch.tokens_per_step != expected
    if is_odd:
        found.append(f"{launch.tokens_per_step} tokens a step were counted, the spec makes {expected}")
    if not is_uneven(spec) and any(rank.step_tokens for rank in launch.ranks):
        found.append("its steps had different numbers of tokens: the batches were not all of one size")
    not_learnt = [*unlearnt(spec, launch)]
    if LEARNING in inactive:
        was_active = launch.learning and not not_learnt
        not_learnt = [f"{LEARNING} was declared to be inactive, and was active"] if was_active else []
    found += [*contradictions(spec, launch.seen, inactive), *not_learnt]
    return (*found, *disagreements(launch.evidence, launch.seen))


def all_troubles(
    spec: Spec, launches: Sequence[Launch], inactive: frozenset[str], explained: Sequence[Launch] = ()
) -> tuple[str, ...]:
    """The same of several, each line once, and what a setting did in a baseline's (``explained``) and does no more."""
    lines = dict.fromkeys(line for launch in launches for line in troubles(spec, launch, inactive))
    now, then = ([each.seen for each in some] for some in (launches, explained))
    return (*lines, *(lost(spec, now, then, inactive) if isinstance(spec, TrainSpec) else ()))


def holds_learning(inactive: frozenset[str]) -> bool:
    return LEARNING not in inactive


@dataclass(frozen=True)
class Circumstances:
    lines: tuple[str, ...] = ()
    """One for each thing that spoilt it and may be gone the next time."""
    drift: str = ""
    """By how much its speed changed, where that is too much: more steps may tell which it has."""

    @property
    def all_lines(self) -> tuple[str, ...]:
        return (*self.lines, *filter(None, [self.drift]))


def circumstances(launch: Launch, tolerance: float, experience: Experience | None = None) -> Circumstances:
    """What was around ``launch``; one that drifts by more than half of throughput's ``tolerance`` has no one speed."""
    health = launch.health
    lines = list(neighbours(health))
    for reason, share in health.clock_reasons.items():
        if reason in THROTTLES and share > _THROTTLED_SHARE:
            seen = f"{health.temperature_celsius:.0f} °C, {health.sm_clock_mhz:.0f} MHz"
            lines.append(f"clocks were lowered by {reason} in {share * 100:.0f} % of the time ({seen})")
    if health.memory_errors:
        lines.append(f"{health.memory_errors} new memory error(s) on the GPU (uncorrected ECC, remapped rows)")
    for name, rate in launch.canary.items() if experience and launch.environment.driver else ():
        stored = experience.canaries.get(f"{len(launch.ranks)} {name}", ()) if experience else ()
        usual = median(stored) if stored else 0.0
        if len(stored) >= _FEWEST_CANARIES and not rate >= usual * (1 - _CANARY_LOSS):  # also true of NaN
            rates = f"{name} was {rate:.3g}, usually it is {usual:.3g} here"
            lines.append(f"the canary {rates}: the hardware itself is slow")
    steady = launch.steady
    chance = 0.0 if steady.bimodal and _is_in_order(launch.steady_step_seconds) else _DRIFT_ERRORS * steady.error
    if abs(steady.drift) <= max(tolerance / 2, chance):
        return Circumstances(tuple(lines))
    drift = f"the step time drifted {steady.drift * 100:+.1f} % from the first third of its steady steps to the last"
    return Circumstances(tuple(lines), drift)


def neighbours(health: Health) -> tuple[str, ...]:
    """One line for each process of somebody else's."""
    return tuple(f"another process on the hardware: {line}" for line in health.foreign_processes)


#: How the detail of a check begins that others on its host explain.
TAKEN = "other programs used "
# Of the timed steps, beyond what the stored launches waited: less is judged as it is.
_LEAST_TAKEN = 0.1


def excused(
    check: Check,
    read: Callable[[Sequence[Launch]], float],
    launches: Sequence[Launch],
    held: Sequence[Launch],
    enough: int,
) -> Check:
    """``check``, which says nothing where fewer than ``enough`` of ``launches`` are left without those that are within
    its limit but for waits, longer than those ``held`` have, for cores of a CPU that other programs used. All threads'
    waits may come one after the other, since each part of a step ends with its slowest thread."""
    if check.verdict != "regressed" or not (check.unit == "s" or check.unit.endswith("/s")) or not check.limit:
        return check
    usual, sign = median(_taken(each)[0] for each in held), 1 if check.higher_is_better else -1
    each = ((_taken(one), (check.limit / read([one])) ** sign) for one in launches)
    busy = [told for told, slower in each if told[0] >= usual + _LEAST_TAKEN and slower * (1 - told[0]) <= 1 - usual]
    if not busy or len(launches) - len(busy) >= enough:
        return check
    _, waited, others = max(busy)
    used = f"{others:.1f} core(s) beside it: its threads waited {waited:.1f} s for one in each second of training"
    return replace(check, verdict="inconclusive", detail=f"{TAKEN}{used}; run it again on an idle host")


def _taken(launch: Launch) -> tuple[float, float, float]:
    """Of a second of the timed steps, for how long a rank's threads waited for what others had; what its own took is
    its own; and for how long they waited at all, and how many cores others had."""
    found, whole = [(0.0, 0.0, 0.0)], launch.train_seconds or math.inf
    told = [(rank.host, rank.core_seconds) for rank in launch.ranks if rank.core_seconds]
    for host, (waited, _, busy) in told:
        others = max(0.0, busy - sum(each[1] for at, each in told if at == host))
        found.append((min(waited, others) / whole, waited / whole, others / whole))
    return max(found)


def injected(launches: Sequence[Launch]) -> tuple[str, ...]:
    """The faults under which ``launches`` were measured because somebody asked for them, each once."""
    faults = dict.fromkeys(launch.seen.run.injected for launch in launches)
    return tuple(f"LLMPERF_INJECT={fault}" for fault in faults if fault)


def _is_in_order(seconds: Sequence[float]) -> bool:
    """Whether the last third's speed is another than the first's, but for a tenth of each: that is not chance."""
    third = max(1, len(seconds) // 3)
    first, last, odd = sorted(seconds[:third]), sorted(seconds[-third:]), third // 10
    return first[-1 - odd] < last[odd] or last[-1 - odd] < first[odd]


def unusable(launch: Launch) -> Iterator[str]:
    """What in ``launch`` is no figure to compute with, whatever was asked for; a line each. Every rank is looked at:
    the slowest one's time and the fullest one's memory are maxima, and those hide a NaN."""
    for rank in launch.ranks:
        where = f" on rank {rank.rank}" if len(launch.ranks) > 1 else ""
        for second in rank.step_seconds:
            if not SHORTEST_SECONDS <= second <= LONGEST_SECONDS:  # also true of NaN
                bounds = f"{SHORTEST_SECONDS:g} to {LONGEST_SECONDS:g} s"
                yield f"a step time of {second:g} s is none{where}, expected {bounds}"
                break  # one line for each rank says it
        if not all(0 <= wait <= LONGEST_SECONDS for wait in rank.waiting_seconds):
            yield f"what was waited in a step is no time{where}"
        if not 0 < rank.tokens_per_step < math.inf:
            yield f"no tokens were counted{where}"
        given = rank.step_tokens or (rank.tokens_per_step,) * len(rank.real_tokens)
        if not all(0 <= real <= most for real, most in zip(rank.real_tokens, given, strict=False)):
            yield f"more real tokens were counted than there were tokens, or fewer than none{where}"
        if not all(0 <= peak < math.inf for peak in (rank.peak_reserved_bytes, rank.peak_allocated_bytes)):
            yield f"a memory peak is not a number of bytes{where}"
    if not any(rank.peak_reserved_bytes > 0 for rank in launch.ranks):
        yield "no memory use was recorded"
    yield from _bad_losses(launch)


def _bad_losses(launch: Launch) -> Iterator[str]:
    num_steps = len(launch.ranks[0].step_seconds)
    if launch.losses and len(launch.losses) != num_steps:
        yield f"{len(launch.losses)} losses were recorded in {num_steps} steps"
    elif not launch.losses and launch.evidence.get("losses") != "unknown":
        yield "no loss was recorded"
    # Once one is lost, every later one is.
    lost = [(step, loss) for step, loss in enumerate(launch.losses, 1) if not math.isfinite(loss)][:1]
    yield from (f"the loss was {loss} at step {step}" for step, loss in lost)


def disagreements(stored: Mapping[str, Any], evidence: Evidence) -> Iterator[str]:
    """What another rank saw differently; the settings' own checks look at rank 0's."""
    facts = {**dict(flat(stored)), **stored}  # old records have whole objects by their one name
    for name, others in evidence.run.other_ranks.items():
        said = ", ".join(f"rank {rank} has {value}" for rank, value in others.items())
        yield f"{name.removeprefix('setup.')}: {said}, rank 0 has {facts.get(name)}"


# Learning: what an inspected step says against a launch, exact but for what rounding does to a norm or an update.

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


def _named(names: Sequence[str], learning: Learning) -> str:
    told = ", ".join(names[:_NAMES]) + (", …" if len(names) > _NAMES else "")
    return f"{len(names)} of {learning.tensors} tensors ({told})"
