"""Learning: whether a launch learns: bits, counts and names of one step that is looked at after all that is timed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pytest_llmperf.support import grouped
from pytest_llmperf.support.codec import sparse


@sparse()
@dataclass(frozen=True, kw_only=True)
class ReplayedUpdate:
    """Of a sample of each tensor, on one rank or the worst of all."""

    tensors: int = 0
    asked: str = ""
    """The optimizer and its settings, as the arguments have them."""
    roundings: float = 0.0
    """The largest difference, in what rounding once does to that element."""
    tensor: str = ""
    figure: str = ""
    """Of what: the ``weight``, or one of the optimizer's averages."""
    found: float = 0.0
    """By how much the step changed that element of it."""
    expected: float = 0.0
    miscounted: tuple[str, ...] = ()
    """Names of tensors of which the optimizer has counted another number of steps than the Trainer."""
    counts: tuple[int, int] = (0, 0)
    """The least and the most of the optimizer's counts."""
    none: str = ""

    def __bool__(self) -> bool:
        return not self.none


def worst_replay(replays: Sequence[ReplayedUpdate]) -> ReplayedUpdate:
    """Return the worst of all ranks; none where any rank has none."""
    for each in replays:
        if each.none:
            return each
    # A shard may be empty.
    counts = [count for each in replays if each.tensors for count in each.counts] or [0]
    return replace(
        max(replays, key=lambda each: each.roundings),
        tensors=max(each.tensors for each in replays),
        miscounted=tuple(dict.fromkeys(name for each in replays for name in each.miscounted)),
        counts=(min(counts), max(counts)),
    )


#: Why a record of before such steps has none.
OLDER = "recorded before a step was inspected"


@dataclass(frozen=True)
class TensorSeen:
    """One tensor that is to be trained, or a shard of it, as one rank saw it."""

    name: str
    is_updated: bool
    is_reached: bool
    """Whether it had a gradient in that step, and not one of zeros alone."""
    has_moved: bool
    """Whether its bits are others than before the first step."""
    is_narrow: bool
    """Whether it has 16 bits: an update may be less than its last one."""
    weights: int
    """Sum of its bits after the step, as whole numbers of its width."""
    gradient: int
    """The same of its gradient, before that is clipped."""


@dataclass(frozen=True, kw_only=True)
class _Inspected:
    """What a rank and a launch tell alike, each its worst."""

    stale: int = 0
    """Tensors of one rank whose gradients were not zero as the step began."""
    dropped: int = 0
    """Tensors whose gradients of one pass were gone, or others, when the next one's were added."""
    max_norm: float = 0.0
    """To which gradients are clipped; 0: they are not."""
    largest_update: float = 0.0
    """Of a sample of weights, in learning rates, without the decay and what rounding does."""
    update_bound: float = math.inf
    """No update of this optimizer is larger, in learning rates; infinite where nobody knows."""
    replay: ReplayedUpdate = ReplayedUpdate(none="recorded before updates were replayed")
    learning_rates: tuple[float, float] = (0.0, 0.0)
    """Least and most of the optimizer's groups."""
    scheduled_rate: float = 0.0
    steps: int = 0
    """Of the optimizer, by the Trainer's count."""
    schedule_steps: int = 0
    """Of the schedule, in steps of the optimizer."""
    is_scaled: bool = False
    misorder: str = ""
    """What of the order in which the Trainer by itself takes samples is not as its arguments ask; empty: nothing."""
    labels: bool = True
    """Whether each label was its own input, or left out of the loss."""
    future: float | None = None
    """By how much what comes later changes what is said before, as a share of what it changes later; or not tried."""
    none: str = ""
    """Why it was not looked at, if it was not."""


@dataclass(frozen=True, kw_only=True)
class RankLearning(_Inspected):
    """The inspected step, as one rank saw it."""

    shard: int = 0
    """Ranks of the same one hold the same weights."""
    tensors: tuple[TensorSeen, ...] = ()
    squares: float = 0.0
    """Sum of squares of its gradients, once they are exchanged."""
    clipped_squares: float = 0.0
    clip_factors: tuple[float, ...] = ()
    """By what a tensor's gradient was multiplied then: where that was least, and most."""
    samples: tuple[int, ...] = ()
    """Of the data set, by index, that it was given; -1: one that is not there."""
    expected_samples: tuple[int, ...] = ()
    """Those that all ranks together should have been given, in the order of the data set."""
    ambiguous: frozenset[int] = frozenset()
    """Those of them that the data set has more than once."""


@sparse()
@dataclass(frozen=True, kw_only=True)
class Learning(_Inspected):
    """The inspected step of a launch, of all its ranks."""

    tensors: int = 0
    unheld: tuple[str, ...] = ()
    """Names of those that the optimizer does not hold."""
    unreached: tuple[str, ...] = ()
    """Of those that no gradient reached, and that have not moved."""
    still: tuple[str, ...] = ()
    """Of those that a gradient reached, and that have not moved though they have more than 16 bits."""
    lost: int = 0
    """How many of 16 bits a gradient reached, and have not moved: their updates were less than the last bit."""
    differing_weights: tuple[str, ...] = ()
    """Of those that ranks should hold alike, and do not."""
    differing_gradients: tuple[str, ...] = ()
    gradient_norm: float = 0.0
    """Of the whole gradient, before it was clipped."""
    clip_factors: tuple[float, float] = (1.0, 1.0)
    """By what a norm was multiplied, of a tensor or of all, where that was least, and most."""
    shared_samples: int = 0
    """Samples of that step that were read more than once."""
    foreign_samples: int = 0
    """What ranks were given and the data set does not hold."""
    misplaced_samples: int = 0
    """What ranks were given and is another step's in the order of the data set."""

    def __bool__(self) -> bool:
        return not self.none


def merged_learning(ranks: Sequence[RankLearning]) -> Learning:
    """Return what all ranks saw, as one; nothing where any rank saw nothing."""
    for rank, seen in enumerate(ranks):
        if seen.none:
            return Learning(none=f"rank {rank}: {seen.none}" if len(ranks) > 1 else seen.none)
    squares = sum(seen.squares for seen in {seen.shard: seen for seen in ranks}.values())
    factors = [factor for seen in ranks for factor in seen.clip_factors]
    # Of nothing at all nothing was taken.
    factors += [math.sqrt(seen.clipped_squares / seen.squares) if seen.squares > 0 else 1.0 for seen in ranks]
    first, rates = ranks[0], [rate for seen in ranks for rate in seen.learning_rates]
    widest = max(ranks, key=lambda seen: seen.largest_update - seen.update_bound)
    ambiguous, expected = frozenset[int]().union(*(seen.ambiguous for seen in ranks)), first.expected_samples
    # The step may have too many of some samples; what the data set does not hold is told by itself.
    read = Counter(sample for seen in ranks for sample in seen.samples if sample >= 0)
    return Learning(
        **{name: getattr(first, name) for name in "max_norm scheduled_rate steps schedule_steps is_scaled".split()},
        tensors=len(first.tensors),
        unheld=tuple(dict.fromkeys(each.name for seen in ranks for each in seen.tensors if not each.is_updated)),
        unreached=_of_all(ranks, lambda each: not each.is_reached and not each.has_moved),
        still=_of_all(ranks, lambda each: not each.has_moved, lambda each: each.is_reached and not each.is_narrow),
        lost=len(_of_all(ranks, lambda each: not each.has_moved, lambda each: each.is_reached and each.is_narrow)),
        differing_weights=_differing(ranks, lambda each: each.weights),
        differing_gradients=_differing(ranks, lambda each: each.gradient),
        stale=max(seen.stale for seen in ranks),
        gradient_norm=math.sqrt(squares),
        clip_factors=(min(factors), max(factors)),
        largest_update=widest.largest_update,
        update_bound=widest.update_bound,
        dropped=max(seen.dropped for seen in ranks),
        replay=worst_replay([seen.replay for seen in ranks]),
        learning_rates=(min(rates), max(rates)),
        shared_samples=sum(times > 1 for sample, times in read.items() if sample not in ambiguous),
        foreign_samples=sum(sample < 0 for seen in ranks for sample in seen.samples),
        misplaced_samples=(read - Counter(expected)).total() if expected else 0,
        misorder=next(filter(None, (seen.misorder for seen in ranks)), ""),
        labels=all(seen.labels for seen in ranks),
        future=max((seen.future for seen in ranks if seen.future is not None), default=None),
    )


def _of_all(
    ranks: Sequence[RankLearning],
    wanted: Callable[[TensorSeen], bool],
    of_one: Callable[[TensorSeen], bool] = lambda _: True,
) -> tuple[str, ...]:
    """Names that are ``wanted`` on all ranks, and ``of_one`` on one at least: a shard may be empty."""
    by_name = grouped((each.name, each) for seen in ranks for each in seen.tensors)
    return tuple(name for name, several in by_name.items() if all(map(wanted, several)) and any(map(of_one, several)))


def _differing(ranks: Sequence[RankLearning], bits: Callable[[TensorSeen], int]) -> tuple[str, ...]:
    """Names of what ranks of one shard do not hold alike."""
    held = grouped(((seen.shard, each.name), bits(each)) for seen in ranks for each in seen.tensors)
    return tuple(dict.fromkeys(name for (_, name), several in held.items() if len(set(several)) > 1))


# Small trainings beside the plain form: which a launch makes, and what they did, tensor by tensor.

#: Trainings of the plain form, each with weights and rows of its own, from which the measure of its rounding is taken;
#: and of these as many as are made of a spec beside them.
PARITY_SEEDS, PARITY_BESIDE = 5, 3


@dataclass(frozen=True, kw_only=True)
class ParityOrder:
    """The plain form's truth and rounding, or one training beside that truth."""

    truth: str = ""
    """The folder of the launch that left it; empty: this launch makes it."""
    shrinks: float = 1.0
    """How long a sliding window is in the small model beside that in the measured one, as its sequences are."""
    gathered: str = "no"
    """In which type the plain form's weights are used, where that is another than theirs and there is no autocast."""


ERRORS_FILE = "training-errors.json"

GRADIENT, UPDATE = "gradient", "update"
#: Forms: in the spec's own precision, and in fp32.
OWN, FP32 = "own", "fp32"


@dataclass(frozen=True, kw_only=True)
class TensorError:
    """One tensor of one step beside the true one; norms are Euclidean."""

    kind: str
    """``gradient``, or ``update``: what the optimizer made of the gradients that this very training gave it."""
    tensor: str
    step: int
    """From 1."""
    true_norm: float
    norm: float
    """0 where there is none."""
    cosine: float
    error: float
    """Norm of the difference."""
    rank: int = 0

    @property
    def key(self) -> tuple[str, str, int]:
        """Its kind, name and step."""
        return self.kind, self.tensor, self.step


@dataclass(frozen=True, kw_only=True)
class TrainingErrors:
    """A few steps of one training."""

    form: str
    """``own`` or ``fp32``."""
    precision: str
    """For people."""
    roundoff: float
    """Of the type of its products: by which fraction one rounding changes a value at most."""
    seed: int
    losses: tuple[float, ...]
    true_losses: tuple[float, ...]
    true_norms: tuple[float, ...]
    """Of all gradients of a step together."""
    clipping_errors: tuple[float, ...]
    """By which fraction gradients came out of clipping longer or shorter than they should."""
    tensors: tuple[TensorError, ...]
    product_types: Mapping[str, str] = field(default_factory=dict)
    """Type of each linear layer's products; of a compiled model nobody looks."""
    true_optimizer: bool = True
    """Whether its optimizer is the plain form's, and not one that rounds its states."""
    short_scalars: bool = False
    """Whether its optimizer may compute bias corrections in fp32, as fused ones do; the plain form has Python's."""
    unknown: tuple[str, ...] = ()
    """Parameters that one of the two trains and the other does not have."""
    lost_updates: float = 0.0
    """Share of weights that an update should have moved and that stayed."""


def merged_errors(by_rank: Sequence[TrainingErrors]) -> TrainingErrors:
    """Merge all ranks: the mean of their losses, and of each tensor what the rank says that is furthest off."""
    first, count = by_rank[0], len(by_rank)
    worst: dict[tuple[str, str, int], TensorError] = {}
    for rank, one in enumerate(by_rank):
        for tensor in one.tensors:
            key = (tensor.kind, tensor.tensor, tensor.step)
            if key not in worst or not tensor.error <= worst[key].error:  # what is not a number is as wrong as can be
                worst[key] = replace(tensor, rank=rank)
    return replace(
        first,
        losses=tuple(sum(losses) / count for losses in zip(*(one.losses for one in by_rank), strict=True)),
        clipping_errors=tuple(
            max(errors, key=abs) for errors in zip(*(one.clipping_errors for one in by_rank), strict=True)
        ),
        tensors=tuple(worst.values()),
        unknown=tuple(dict.fromkeys(name for one in by_rank for name in one.unknown)),
        lost_updates=max(one.lost_updates for one in by_rank),
    )


@dataclass(frozen=True)
class MadeTrainings:
    """Those of one launch: what was seen of each, and the folder where the plain form's true gradients lie too."""

    folder: str
    errors: tuple[TrainingErrors, ...]
