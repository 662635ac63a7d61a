"""Whether a training still learns what it did, seed beside the same seed; and one training beside the truth, no further
from it than rounding takes the plain form, else what differs. Pure.

Curves are held by one-sided tests in both directions, as MLPerf refuses what converges faster, too. A seed's order of
rows and its initial weights cancel in a pair; if they no longer do, pairs scatter more, and the tests hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median_low, stdev, variance

from pytest_llmperf.judge.baseline import FEWEST_STEPS
from pytest_llmperf.judge.stats import quantile
from pytest_llmperf.records.learning import FP32, GRADIENT, UPDATE, TensorError, TrainingErrors
from pytest_llmperf.records.metrics import METRICS
from pytest_llmperf.records.result import Check, CurveWord, JudgedCurve, JudgedPart

# Parts: the losses of a training as a few means, each over as many steps as all before it.

_PARTS = 4


@dataclass(frozen=True)
class Span:
    """Steps, counted from 1."""

    first: int
    last: int


def spans(steps: int) -> tuple[Span, ...]:
    """Those of so many steps: ``2 to 12, 13 to 25, 26 to 50, 51 to 100``; ValueError: fewer than ``FEWEST_STEPS``."""
    if steps < FEWEST_STEPS:
        raise ValueError(f"{steps} steps, expected {FEWEST_STEPS} or more")
    ends = [1, *(steps >> shift for shift in reversed(range(_PARTS)))]
    return tuple(Span(before + 1, end) for before, end in pairwise(ends))


def parts_of(losses: Sequence[float]) -> tuple[float, ...]:
    """The mean loss of each span, in nats a token."""
    return tuple(fmean(losses[span.first - 1 : span.last]) for span in spans(len(losses)))


# Spread: how far apart trainings of other seeds are in each part, and what difference beside that is none.

# Of a standard deviation between seeds: the mean of sixteen trainings is not known better than that.
_SHARE = 0.25
# Of the loss: about twice what rounding was seen to do to one, and a part is a mean of many.
_ROUNDING = 0.001


@dataclass(frozen=True)
class SeedSpread:
    mean: float
    """Nats a token."""
    sd: float

    @property
    def nothing(self) -> float:
        """Up to here a difference in the mean loss is none, in nats."""
        return max(_SHARE * self.sd, _ROUNDING * self.mean)


def spreads(curves: Sequence[Sequence[float]]) -> tuple[SeedSpread, ...]:
    """Of each part, over the losses of two seeds or more."""
    by_part = zip(*map(parts_of, curves), strict=True)
    return tuple(SeedSpread(fmean(part), stdev(part)) for part in by_part)


#: False alarms of a case that learns what it did, in one run at most.
ALARMS = 0.001
# A quarter for what two seeds show, where only gross faults do.
_EARLY_SHARE, _EARLY_SEEDS = 0.25, 2
# Of the interval in which a difference is looked for, each side.
_CONFIDENCE = 0.95
_HOW: Mapping[CurveWord, str] = {
    "worse": "it learns more slowly",
    "faster": "it learns faster than it may, as with labels that leak",
}
# Nine digits are kept of a loss.
_LAST_DIGIT = 5e-9


@dataclass(frozen=True)
class _Look:
    """How far a part's trainings are from what is stored, and how well that is known."""

    difference: float
    error: float
    df: float
    level: float
    """Of false alarms, in one direction."""


def judge_curve(trained: Mapping[int, Sequence[float]], stored: Mapping[int, Sequence[float]]) -> JudgedCurve:
    """The losses of the seeds that were ``trained``, the first of the ``stored`` ones. One seed tells that all is as it
    was; else the next ones have to be trained: ``undecided``, until all were, or two show a gross fault."""
    seeds = tuple(trained)
    everything = spreads(list(stored.values()))
    parts, looks = [], []
    both = (zip(*(parts_of(side[seed]) for seed in seeds), strict=True) for side in (trained, stored))
    for span, spread, now, then in zip(spans(len(stored[seeds[0]])), everything, *both, strict=True):
        look = _look(now, then, spread, len(stored), tests=2 * len(everything))  # one in each direction
        looks.append(look)
        parts.append(
            JudgedPart(
                first=span.first,
                last=span.last,
                loss=fmean(now),
                # Two are held against the mean of all, so that is what they stand beside.
                stored=fmean(now) - look.difference if look else fmean(then),
                nothing=spread.nothing,
                # The least difference that is told from nothing.
                seen=spread.nothing + look.error * quantile(1 - look.level, look.df) if look else None,
            )
        )
    word, reason = _decided(trained, stored, everything, looks, parts)
    return JudgedCurve(verdict=word, reason=reason, seeds=seeds, stored_seeds=len(stored), parts=tuple(parts))


def _decided(
    trained: Mapping[int, Sequence[float]],
    stored: Mapping[int, Sequence[float]],
    everything: Sequence[SeedSpread],
    looks: Sequence[_Look | None],
    parts: Sequence[JudgedPart],
) -> tuple[CurveWord, str]:
    of_seeds = f"{len(trained)} of {len(stored)} seeds"
    pairs = ((now, then) for seed, losses in trained.items() for now, then in zip(losses, stored[seed], strict=True))
    if all(abs(now - then) <= _LAST_DIGIT * abs(then) for now, then in pairs):
        return "same", f"the same to the last digit ({of_seeds})"
    furthest = max(parts, key=lambda part: abs(part.difference) / part.nothing)
    if len(trained) == 1:
        is_near = all(abs(part.difference) <= part.nothing for part in parts)
        return ("same" if is_near else "undecided"), _beside(furthest, of_seeds)
    told = [part for part in parts if part.seen is not None and abs(part.difference) > part.seen]
    if told:
        worst = max(told, key=lambda part: abs(part.difference) / (part.seen or math.inf))
        word: CurveWord = "worse" if worst.difference > 0 else "faster"
        return word, f"{_beside(worst, of_seeds)}: {_HOW[word]}"
    if len(trained) < len(stored):
        return "undecided", _beside(furthest, of_seeds)
    # Whether each difference is none, and cannot well be as much as another seed's.
    if all(
        look
        and abs(look.difference) <= spread.nothing
        and abs(look.difference) + look.error * quantile(_CONFIDENCE, look.df) <= spread.sd
        for spread, look in zip(everything, looks, strict=True)
    ):
        return "same", _beside(furthest, of_seeds)
    least = (furthest.seen or 0.0) / furthest.stored
    return "undecided", f"{_beside(furthest, of_seeds)}, only {least:.2%} or more would have been told"


def _look(now: Sequence[float], then: Sequence[float], spread: SeedSpread, stored: int, *, tests: int) -> _Look | None:
    """Two of the seeds are held against all that are stored, all of them in pairs; between there is no test."""
    num = len(now)
    if num == stored:
        share = 1 - _EARLY_SHARE if num > _EARLY_SEEDS else 1.0
        differences = [mine - theirs for mine, theirs in zip(now, then, strict=True)]
        return _Look(fmean(differences), stdev(differences) / math.sqrt(num), num - 1, ALARMS * share / tests)
    if num != _EARLY_SEEDS:
        return None
    # Of equal variance: so few of the one side have none of their own worth knowing.
    df = num + stored - 2
    pooled = (variance(now) * (num - 1) + spread.sd**2 * (stored - 1)) / df
    error = math.sqrt(pooled * (1 / num + 1 / stored))
    return _Look(fmean(now) - spread.mean, error, df, ALARMS * _EARLY_SHARE / tests)


def _beside(part: JudgedPart, of_seeds: str) -> str:
    """``loss of steps 51 to 100 is 5.672, 5.613 is stored: +1.05 %, up to 0.19 % is nothing (5 of 5 seeds)``."""
    share = part.difference / part.stored
    nothing = part.nothing / part.stored
    return (
        f"loss of steps {part.first} to {part.last} is {part.loss:.4f}, {part.stored:.4f} is stored: {share:+.2%}, "
        f"up to {nothing:.2%} is nothing ({of_seeds})"
    )


# Parity: one training beside the truth.

_Key = tuple[str, str, int]
"""A kind, a tensor and a step."""

# Another kernel may round each value once more than the plain form does, so its error may be twice as large: the many
# numbers of a large tensor make its error nearly the same for all seeds, which would allow nothing.
_LEAST_FACTOR = 2.0
# What fp32 makes of a scalar, and AdamW's betas: its bias corrections are 1 - beta**step.
_FP32, _BETAS = 2.0**-24, (0.9, 0.999)


@dataclass(frozen=True)
class Rounding:
    """Of the plain form in one precision, from several trainings of different weights and rows. Of these the middle one
    counts, and how far it is above the smallest: where rounding takes a ReLU over its edge, an error is a thousand
    times what it is elsewhere, and would allow everything."""

    tensors: Mapping[_Key, float]
    """The usual relative error of each tensor by kind, name and step."""
    factors: Mapping[tuple[str, int], float]
    """By kind and step: how many times that another training may have; see ``_factor``."""
    loss: float
    """The largest error of any step's loss, as a fraction of it."""
    clipping: float
    product_types: Mapping[str, str]

    @classmethod
    def of(cls, trainings: Sequence[TrainingErrors]) -> Rounding:
        """What ``trainings`` of the plain form, all in one precision, tell."""
        usual: dict[_Key, float] = {}
        factors: dict[tuple[str, int], float] = {}
        # Optimizers that round their states are another kind than those that do not; the wider one is the limit.
        for exact in sorted({training.true_optimizer for training in trainings}):
            alike = [training for training in trainings if training.true_optimizer is exact]
            by_seed = _by_seed(alike)
            # No more than one rounding of all gradients together.
            tensors = ((one, tensor) for one in alike for tensor in one.tensors)
            unclear = {tensor.key for one, tensor in tensors if tensor.true_norm <= _least(one, tensor)}
            for key, seeds in by_seed.items():
                usual[key] = max(usual.get(key, 0.0), median_low(seeds))
            for kind, step in {(kind, step) for kind, _, step in by_seed}:
                clear = [by_seed[key] for key in by_seed if key[::2] == (kind, step) and key not in unclear]
                factors[kind, step] = max(factors.get((kind, step), 1.0), _factor(clear))
        return cls(
            tensors=usual,
            factors=factors,
            loss=max(share for training in trainings for share in loss_errors(training)),
            clipping=max(abs(error) for training in trainings for error in training.clipping_errors),
            product_types=trainings[0].product_types,
        )

    def limit(self, training: TrainingErrors, tensor: TensorError) -> float:
        """The relative error that ``tensor`` of another training may have."""
        factor = self.factors.get((tensor.kind, tensor.step), 1.0)
        own = factor * self.tensors.get(tensor.key, 0.0)
        if tensor.kind == UPDATE and training.short_scalars:
            # How far an update may be off whose bias corrections were computed in fp32: the second enters by its root.
            first, second = (_FP32 / (1 - beta**tensor.step) for beta in _BETAS)
            own = max(own, first + second / 2)
        least = _least(training, tensor)
        # One rounding of all gradients together: a tensor that is a small part of them is not told from that.
        return max(own, least / max(tensor.true_norm, least)) if least else own


def relative(training: TrainingErrors, tensor: TensorError) -> float:
    """Its error, as a fraction of its norm, or of what one rounding makes of all gradients, where that is more."""
    whole = max(tensor.true_norm, _least(training, tensor))
    if whole:
        return tensor.error / whole
    return 0.0 if tensor.error == 0 else math.inf


def loss_errors(training: TrainingErrors) -> Iterator[float]:
    """Of each step, as a fraction of the loss."""
    for loss, true in zip(training.losses, training.true_losses, strict=True):
        yield abs(loss - true) / abs(true)


def _by_seed(trainings: Sequence[TrainingErrors]) -> dict[_Key, list[float]]:
    found: dict[_Key, dict[int, float]] = {}
    for training in trainings:
        for tensor in training.tensors:
            # Short states are short from the second step on: what the first one shows is no rounding of theirs.
            if tensor.kind == UPDATE and tensor.step == 1 and not training.true_optimizer:
                continue
            seeds = found.setdefault(tensor.key, {})
            seeds[training.seed] = max(seeds.get(training.seed, 0.0), relative(training, tensor))
    return {key: list(seeds.values()) for key, seeds in found.items()}


def _least(training: TrainingErrors, tensor: TensorError) -> float:
    """A gradient of this norm is no more than one rounding of all gradients together; updates have no such floor."""
    return training.roundoff * training.true_norms[tensor.step - 1] if tensor.kind == GRADIENT else 0.0


def _factor(tensors: Sequence[Sequence[float]]) -> float:
    """The cube of how far one tensor's usual error is above its smallest, of the tensor where that is most; at least 2.
    From the usual one to the largest is as far again, and another kernel's sums may be once as far beyond."""
    ratios = [median_low(seeds) / min(seeds) for seeds in tensors if min(seeds) > 0]
    return max(_LEAST_FACTOR, max(ratios, default=1.0) ** 3)


# Shares of weights that did not move, from which on a reader is told.
_LOST = 0.01


@dataclass(frozen=True)
class Parity:
    """Of one training, in each precision that it was made in."""

    troubles: tuple[str, ...]
    """What is further off than rounding takes it, the cause first; empty: nothing."""
    checks: tuple[Check, ...]
    """Of losses, gradients and updates what comes nearest to its limit, or is furthest beyond."""
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Figure:
    """One figure of one step: a tensor, a loss, or how gradients were clipped."""

    step: int
    error: float
    limit: float
    value: float = 0.0
    true: float = 0.0
    tensor: TensorError | None = None

    @property
    def times(self) -> float:
        """Its error in limits; what is no number is beyond every limit."""
        if self.error == 0:
            return 0.0
        return self.error / self.limit if self.limit and not math.isnan(self.error) else math.inf


def judge_parity(trainings: Sequence[TrainingErrors], plain: Sequence[TrainingErrors]) -> Parity:
    """``trainings`` of one spec, of several seeds and precisions, against those of the plain form. What is wrong is
    wrong whatever the weights and rows: of each figure the seed counts that is nearest to the truth. A rounding that
    happens to take a ReLU over its edge, or a token to another expert, does so for one of them."""
    troubles: list[str] = []
    checks: dict[str, Check] = {}
    # In fp32 rounding hides least: what is told there is told first.
    for form in sorted({one.form for one in trainings}, key=lambda form: form != FP32):
        rounding = Rounding.of([one for one in plain if one.form == form])
        own = [one for one in trainings if one.form == form]
        best = _nearest(own, rounding)
        troubles += _troubles(own[0], best, rounding)
        for kind in (kind for kind in (_LOSS, GRADIENT, UPDATE) if best[kind]):
            worst = max(best[kind], key=lambda one: one.times)
            what = f"{worst.tensor.tensor}, " if worst.tensor else ""
            detail = f"{what}step {worst.step}, {own[0].precision}"
            check = METRICS[f"{kind}_error"].check(worst.error, limit=worst.limit, detail=detail)
            known = checks.get(check.metric)
            if known is None or _share(check) > _share(known):
                checks[check.metric] = check
    return Parity(tuple(troubles), tuple(checks.values()), tuple(_notes(trainings)))


# Beside the kinds of tensors.
_LOSS, _CLIPPING = "loss", "clipping"


def _nearest(trainings: Sequence[TrainingErrors], rounding: Rounding) -> dict[str, list[_Figure]]:
    found: dict[_Key, list[_Figure]] = {}
    for training in trainings:
        for tensor in training.tensors:
            error, limit = relative(training, tensor), rounding.limit(training, tensor)
            found.setdefault(tensor.key, []).append(_Figure(tensor.step, error, limit, tensor=tensor))
        losses = zip(loss_errors(training), training.losses, training.true_losses, strict=True)
        clipping = ((abs(error), 1 + error, 1.0) for error in training.clipping_errors)
        for kind, measured, figures in ((_LOSS, rounding.loss, losses), (_CLIPPING, rounding.clipping, clipping)):
            # Of one figure a step nothing averages out.
            factor = max((value for (kind, _), value in rounding.factors.items() if kind == GRADIENT), default=1.0)
            limit = factor * max(measured, training.roundoff)
            for step, (error, value, true) in enumerate(figures, 1):
                found.setdefault((kind, "", step), []).append(_Figure(step, error, limit, value, true))
    nearest: dict[str, list[_Figure]] = {kind: [] for kind in (_LOSS, GRADIENT, UPDATE, _CLIPPING)}
    for (kind, *_), several in found.items():
        nearest[kind].append(min(several, key=lambda one: one.times))
    return nearest


def _troubles(training: TrainingErrors, best: Mapping[str, Sequence[_Figure]], rounding: Rounding) -> Iterator[str]:
    where = f"({training.precision})"
    for name in training.unknown:
        yield f"{name} is a parameter of one of the two alone"
    types, plain = training.product_types, rounding.product_types
    differ = [name for name in types if types[name] != plain.get(name, types[name])]
    if differ:
        name, more = differ[0], _more(len(differ), len(types), "linear layers")
        yield f"products of {name} come out in {types[name]}, those of the plain form in {plain[name]}{more} {where}"
    # By step, and within one as a step goes; but a gradient says where, and a loss does not.
    found = [(step, 0, line) for step, line in _far(best[GRADIENT])]
    for one in [one for one in best[_LOSS] if one.times > 1][:1]:
        apart = f"rounding alone leaves {one.limit * abs(one.true):.1e} between them"
        found.append((one.step, 1, f"loss of step {one.step} is {one.value:.7g}, expected {one.true:.7g}, {apart}"))
    for one in [one for one in best[_CLIPPING] if one.times > 1][:1]:
        times = f"{one.value:.4g} times the norm that is allowed, rounding alone leaves {one.limit:.1e} beside 1"
        found.append((one.step, 2, f"gradients of step {one.step} are clipped to {times}"))
    found += [(step, 3, line) for step, line in _far(best[UPDATE])]
    yield from (f"{line} {where}" for _, _, line in sorted(found))


def _far(figures: Sequence[_Figure]) -> Iterator[tuple[int, str]]:
    step = min((one.step for one in figures if one.times > 1), default=None)
    if step is not None:
        of_step = [one for one in figures if one.step == step]
        far = [one for one in of_step if one.times > 1]
        worst = max(far, key=lambda one: one.times)
        if worst.tensor is not None:
            told = _in_words(worst.tensor, worst.limit)
            yield step, f"{told}{_more(len(far), len(of_step), 'tensors')}, step {step}"


def _in_words(tensor: TensorError, limit: float) -> str:
    """``gradient of model.norm.weight points elsewhere: cosine 0.83, rounding alone leaves 0.9998``."""
    what = f"{tensor.kind} of {tensor.tensor}" + (f" on rank {tensor.rank}" if tensor.rank else "")
    if math.isnan(tensor.error) or math.isinf(tensor.error):
        return f"{what} is no number"
    if not tensor.norm:
        return f"{what} is zero, expected one of norm {tensor.true_norm:.3g}"
    if not tensor.true_norm:
        return f"{what} is of norm {tensor.norm:.3g}, expected none"
    least = math.sqrt(max(0.0, 1 - limit**2))
    length = tensor.norm / tensor.true_norm
    # Of the two parts of an error, the larger: across the true one, and along it.
    across, along = length * math.sqrt(max(0.0, 1 - tensor.cosine**2)), abs(length * tensor.cosine - 1)
    if tensor.cosine < least and (tensor.cosine < 0 or across > along):
        digits = min(15, max(2, 1 - math.floor(math.log10(least - tensor.cosine))))
        return f"{what} points elsewhere: cosine {tensor.cosine:.{digits}f}, rounding alone leaves {least:.{digits}f}"
    return f"{what} is {length:.6g} times as long as it should be, rounding alone leaves {limit:.1e} beside 1"


def _more(count: int, of: int, what: str) -> str:
    return f" (and {count - 1} more of {of} {what})" if count > 1 else ""


def _share(check: Check) -> float:
    return check.value / check.limit if check.limit else math.inf if check.value else 0.0


def _notes(trainings: Sequence[TrainingErrors]) -> Iterator[str]:
    for training in {one.form: one for one in trainings}.values():
        if training.lost_updates >= _LOST:
            yield (
                f"{training.lost_updates:.0%} of the weights stayed where an update should have moved them: too small "
                f"for their last bit ({training.precision})"
            )
        if not any(one.kind == UPDATE for one in training.tensors):
            yield f"updates are not compared: this optimizer has no plain form ({training.precision})"
