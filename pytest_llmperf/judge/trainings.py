"""One training beside the truth: no further from it than rounding takes the plain form, else what differs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from pytest_llmperf.records.learning import FP32, GRADIENT, UPDATE, TensorError, TrainingErrors
from pytest_llmperf.records.metrics import METRICS
from pytest_llmperf.records.result import Check

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
    if whole := max(tensor.true_norm, _least(training, tensor)):
        return tensor.error / whole
    return 0.0 if tensor.error == 0 else math.inf


def loss_errors(training: TrainingErrors) -> Iterator[float]:
    """Of each step, as a fraction of the loss."""
    return (abs(loss - true) / abs(true) for loss, true in zip(training.losses, training.true_losses, strict=True))


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
    yield from (f"{name} is a parameter of one of the two alone" for name in training.unknown)
    types, plain = training.product_types, rounding.product_types
    if differ := [name for name in types if types[name] != plain.get(name, types[name])]:
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
    if (step := min((one.step for one in figures if one.times > 1), default=None)) is not None:
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
