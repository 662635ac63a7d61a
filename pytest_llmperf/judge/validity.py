"""Whether a launch may count at all: its arithmetic adds up, what was asked for was active, nobody else was there.

Pure functions of a spec and a record. What they find makes a case ``invalid``, before any comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pytest_llmperf.judge.learning_checks import unlearnt
from pytest_llmperf.judge.stats import Experience
from pytest_llmperf.records.launch import THROTTLES, Health, Launch
from pytest_llmperf.records.steady_state import LONGEST_SECONDS, SHORTEST_SECONDS
from pytest_llmperf.settings.registry import LEARNING, Evidence, contradictions, undeclarable
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
    """One line for each reason not to trust ``launch``; empty where there is none.

    ``inactive`` names settings that are declared to change nothing (Liger on a model without kernels): where one of
    them is asked for, it is trouble if it *was* active.
    """
    found = []
    if launch.digest != spec.digest:
        found.append(f"the record is of other settings (digest {launch.digest}, the spec's is {spec.digest})")
    found += [*unusable(launch), *undeclarable(inactive)]
    if isinstance(spec, TrainSpec):  # a script's ranks may have been meant to differ
        found += [*_against_settings(spec, launch, inactive), *disagreements(launch.evidence, launch.seen)]
    return tuple(found)


def _against_settings(spec: TrainSpec, launch: Launch, inactive: frozenset[str]) -> Iterator[str]:
    """What our own training was to do and did not."""
    expected = spec.sequences_per_step * spec.sequence_length
    if launch.tokens_per_step != expected:
        yield f"{launch.tokens_per_step} tokens a step were counted, the spec makes {expected}"
    if any(rank.step_tokens for rank in launch.ranks):
        yield "its steps had different numbers of tokens: the batches were not all of one size"
    yield from contradictions(spec, launch.seen, inactive)
    not_learnt = [*unlearnt(spec, launch)]
    if LEARNING not in inactive:
        yield from not_learnt
    elif launch.learning and not not_learnt:
        yield f"{LEARNING} was declared to be inactive, and was active"


@dataclass(frozen=True)
class Circumstances:
    """What was around a launch."""

    lines: tuple[str, ...] = ()
    """One for each thing that spoilt it and may be gone the next time."""
    drifts: bool = False
    """Whether its speed changed: more steps may tell which it has."""


def circumstances(launch: Launch, tolerance: float, experience: Experience | None = None) -> Circumstances:
    """What was around ``launch``, as far as it was seen.

    ``tolerance`` is the throughput's: a launch that drifts by more than half of it has no one speed.
    """
    lines = [*neighbours(launch.health), *_unwell(launch.health)]
    for name, rate in launch.canary.items() if experience and launch.environment.driver else ():
        stored = experience.canaries.get(f"{len(launch.ranks)} {name}", ()) if experience else ()
        usual = median(stored) if stored else 0.0
        if len(stored) >= _FEWEST_CANARIES and not rate >= usual * (1 - _CANARY_LOSS):  # also true of NaN
            rates = f"{name} was {rate:.3g}, usually it is {usual:.3g} here"
            lines.append(f"the canary {rates}: the hardware itself is slow")
    steady = launch.steady
    chance = 0.0 if steady.bimodal and _is_in_order(launch.steady_step_seconds) else _DRIFT_ERRORS * steady.error
    drifts = abs(steady.drift) > max(tolerance / 2, chance)
    if drifts:
        drift = f"{steady.drift * 100:+.1f} %"
        lines.append(f"the step time drifted {drift} from the first third of its steady steps to the last")
    return Circumstances(tuple(lines), drifts)


def neighbours(health: Health) -> tuple[str, ...]:
    """One line for each process of somebody else's."""
    return tuple(f"another process on the hardware: {line}" for line in health.foreign_processes)


def injected(launches: Sequence[Launch]) -> tuple[str, ...]:
    """The faults under which ``launches`` were measured because somebody asked for them, each once."""
    faults = dict.fromkeys(launch.seen.run.injected for launch in launches)
    return tuple(f"LLMPERF_INJECT={fault}" for fault in faults if fault)


def _unwell(health: Health) -> Iterator[str]:
    for reason, share in health.clock_reasons.items():
        if reason in THROTTLES and share > _THROTTLED_SHARE:
            yield (
                f"clocks were lowered by {reason} in {share * 100:.0f} % of the time "
                f"({health.temperature_celsius:.0f} °C, {health.sm_clock_mhz:.0f} MHz)"
            )
    if health.memory_errors:
        yield f"{health.memory_errors} new memory error(s) on the GPU (uncorrected ECC, remapped rows)"


def _is_in_order(seconds: Sequence[float]) -> bool:
    """Whether the last third's speed is another than the first's, but for a tenth of each: that is not chance."""
    third = max(1, len(seconds) // 3)
    first, last, odd = sorted(seconds[:third]), sorted(seconds[-third:]), third // 10
    return first[-1 - odd] < last[odd] or last[-1 - odd] < first[odd]


def unusable(launch: Launch) -> Iterator[str]:
    """What in ``launch`` is no figure to compute with, whatever was asked for; a line each.

    Every rank is looked at: the slowest one's time and the fullest one's memory are maxima, and those hide a NaN.
    """
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
        if not all(0 <= real <= rank.tokens_per_step for real in rank.real_tokens):
            yield f"more real tokens were counted than there were tokens, or fewer than none{where}"
        if not all(0 <= peak < math.inf for peak in (rank.peak_reserved_bytes, rank.peak_allocated_bytes)):
            yield f"a memory peak is not a number of bytes{where}"
    if not any(rank.peak_reserved_bytes > 0 for rank in launch.ranks):
        yield "no memory use was recorded"
    yield from _bad_losses(launch)


def _bad_losses(launch: Launch) -> Iterator[str]:
    num_steps = len(launch.ranks[0].step_seconds)
    if not launch.losses:
        if launch.evidence.get("losses") != "unknown":
            yield "no loss was recorded"
    elif len(launch.losses) != num_steps:
        yield f"{len(launch.losses)} losses were recorded in {num_steps} steps"
    for step, loss in enumerate(launch.losses, 1):
        if not math.isfinite(loss):
            yield f"the loss was {loss} at step {step}"
            return  # once it is lost, every later one is


def disagreements(stored: Mapping[str, Any], evidence: Evidence) -> Iterator[str]:
    """What another rank saw differently; the settings' own checks look at rank 0's."""
    facts = {**dict(flat(stored)), **stored}  # old records have whole objects by their one name
    for name, others in evidence.run.other_ranks.items():
        said = ", ".join(f"rank {rank} has {value}" for rank, value in others.items())
        yield f"{name.removeprefix('setup.')}: {said}, rank 0 has {facts.get(name)}"
