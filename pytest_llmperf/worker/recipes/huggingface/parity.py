"""A launch that makes small trainings: the plain form's, truth first, or a spec's beside that truth."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pytest_llmperf.observe.vital_signs import Heartbeat
from pytest_llmperf.records import learning
from pytest_llmperf.records.ranks import Request, write_json
from pytest_llmperf.settings.batch import PASSES, SEQUENCES
from pytest_llmperf.settings.models import small_config
from pytest_llmperf.settings.optimizer import keeps_states_short, learnt_by, true_optimizer
from pytest_llmperf.settings.registry import in_fp32
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.files import replacing
from pytest_llmperf.worker.rank_job import from_ranks
from pytest_llmperf.worker.recipes.huggingface.small_trainer import SmallSteps, Tensors, plain_updates, train_small
from pytest_llmperf.worker.recipes.huggingface.update_replay import fetched

# Half the distance from 1 to the next number of the type.
_ROUNDOFF = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-4}


@dataclass(frozen=True)
class Truth:
    """Losses and gradients of the plain form in double precision."""

    losses: Sequence[float]
    gradients: Sequence[Tensors]

    def save(self, path: Path) -> None:
        with replacing(path, lasts=False) as file:
            torch.save({"losses": list(self.losses), "gradients": [dict(one) for one in self.gradients]}, file)

    @classmethod
    def load(cls, path: Path, device: torch.device | str = "cpu") -> Truth:
        return cls(**torch.load(path, map_location=device, weights_only=True))


def errors_of(form: str, spec: TrainSpec, seen: SmallSteps, truth: Truth) -> learning.TrainingErrors:
    """One training's figures, as this rank saw it; without a plain optimizer of the first step alone, and no update."""
    optimizer = true_optimizer(spec)
    steps = spec.steps if optimizer else 1
    norms = [_total(one) for one in truth.gradients[:steps]]
    tensors = [*_compared(learning.GRADIENT, seen.gradients[:steps], truth.gradients[:steps])]
    clipping, lost = list[float](), 0.0
    for before, after in zip(map(_total, seen.gradients), map(_total, seen.clipped), strict=True):
        expected = before * seen.clip_factor(before)
        clipping.append(after / expected - 1 if expected else 0.0)
    if optimizer:
        updates = plain_updates(optimizer, seen.weights, seen.clipped, seen.decaying, seen.matrices)
        tensors += _compared(learning.UPDATE, seen.updates, updates)
        steps_of = zip(seen.updates, updates, seen.clipped, strict=True)  # where no gradient is, only decay moves
        pairs = [(ours[name], true[name] * (given[name] != 0)) for ours, true, given in steps_of for name in given]
        wanted = sum(fetched((true != 0).sum() for _, true in pairs))
        stayed = sum(fetched(((true != 0) & (ours == 0)).sum() for ours, true in pairs))
        lost = stayed / wanted if wanted else 0.0
    return learning.TrainingErrors(
        form=form,
        precision=spec.precision if spec.fp8 == "no" else f"fp8 {spec.fp8}",
        roundoff=_ROUNDOFF[spec.compute_precision],
        seed=spec.seed,
        losses=tuple(seen.losses[:steps]),
        true_losses=tuple(truth.losses[:steps]),
        true_norms=tuple(norms),
        clipping_errors=tuple(clipping),
        tensors=tuple(tensors),
        product_types=seen.product_types,
        true_optimizer=not keeps_states_short(spec),
        short_scalars=spec.optimizer != optimizer,
        unknown=tuple(sorted(seen.weights[0].keys() ^ truth.gradients[0].keys())),
        lost_updates=lost,
    )


def _compared(kind: str, own: Sequence[Tensors], true: Sequence[Tensors]) -> Iterator[learning.TensorError]:
    for step, (ours, truth) in enumerate(zip(own, true, strict=True), 1):
        pairs = [(ours.get(name, torch.zeros_like(expected)), expected) for name, expected in truth.items()]
        norms = fetched(found.norm() for found, _ in pairs)
        true_norms = fetched(expected.norm() for _, expected in pairs)
        products = fetched((found * expected).sum() for found, expected in pairs)
        errors = fetched((found - expected).norm() for found, expected in pairs)
        for name, norm, true_norm, product, error in zip(truth, norms, true_norms, products, errors, strict=True):
            cosine = product / (norm * true_norm) if norm * true_norm else 0.0
            yield learning.TensorError(
                kind=kind, tensor=name, step=step, true_norm=true_norm, norm=norm, cosine=cosine, error=error
            )


def _total(tensors: Tensors) -> float:
    return float(sum(norm**2 for norm in fetched(one.norm() for one in tensors.values())) ** 0.5)


def make_small_trainings(
    spec: TrainSpec, order: learning.ParityOrder, request: Request, device: torch.device, beat: Heartbeat
) -> None:
    """Leave the figures of each in the launch's folder, and where this launch makes it, the truth of each seed."""
    config = small_config(request.model_config, order.shrinks)
    # What is imported stays: the Trainer collects garbage at each training, and a fork copies every page of it.
    gc.freeze()

    def train(spec: TrainSpec, **how: Any) -> SmallSteps:
        beat.enter("training")
        return train_small(spec, config, request.folder, device, **how)

    if order.truth:
        errors = list(_beside_truth(spec, Path(order.truth), train))
    else:
        errors = [one for n in range(learning.PARITY_SEEDS) for one in _plain(spec, n, order, request.folder, train)]
    beat.enter("finishing")
    if errors:
        write_json(request.folder / learning.ERRORS_FILE, errors)


def _plain(
    plain: TrainSpec, number: int, order: learning.ParityOrder, folder: Path, train: Callable[..., SmallSteps]
) -> Iterator[learning.TrainingErrors]:
    """For one seed: the truth, and the plain form with each step as a whole and in pieces."""
    spec = replace(plain, seed=plain.seed + number)
    exact = replace(spec, optimizer=learnt_by(spec))
    seen = train(in_fp32(replace(exact, optimizer=true_optimizer(spec) or "adamw_torch")), is_plain=True, double=True)
    truth = Truth(seen.losses, seen.gradients)
    truth.save(folder / f"truth-{spec.seed}.pt")
    # FSDP computes with copies of the weights in 16 bits where others compute under autocast, which fp8 needs.
    copies = order.gathered if spec.fp8 == "no" else "no"
    forms = [(learning.OWN, exact if copies == "no" else replace(exact, mixed_precision="no"), copies)]
    if in_fp32(spec).digest != spec.digest:
        forms.append((learning.FP32, in_fp32(exact), "no"))
    for form, whole, gathered in forms:
        # The same sums in another order: each step in several passes.
        own = replace(whole, optimizer=spec.optimizer)
        pieces = replace(own, gradient_accumulation_steps=SEQUENCES // PASSES, micro_batch_size=PASSES)
        for each in (whole, pieces) if form == learning.OWN or keeps_states_short(spec) else (whole,):
            yield errors_of(form, each, train(each, is_plain=True, gathered=gathered), truth)


def _beside_truth(spec: TrainSpec, folder: Path, train: Callable[..., SmallSteps]) -> Iterator[learning.TrainingErrors]:
    """``spec`` in its own precision and in fp32, of all ranks; on other ranks than the first one nothing."""
    exact = in_fp32(spec)
    forms = {learning.OWN: spec} | ({} if exact.digest == spec.digest else {learning.FP32: exact})
    for number in range(learning.PARITY_BESIDE):
        seed = spec.seed + number
        truth: Truth | None = None
        for form, one in forms.items():
            of_seed = replace(one, seed=seed)
            seen = train(of_seed)
            truth = truth or Truth.load(folder / f"truth-{seed}.pt", seen.device)
            if found := from_ranks(errors_of(form, of_seed, seen, truth)):
                yield learning.merged_errors(found)
