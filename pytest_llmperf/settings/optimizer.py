"""Optimizers: by transformers' names, the package each needs, its plain form and the class that it must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_llmperf.settings.parallelism import is_sharded
from pytest_llmperf.settings.setting import Axis, Evidence, Package, Search, Setting, TrainSpec, claimed, equal
from pytest_llmperf.support.files import shipped

# Two implementations of the same steps.
_PYTORCHS_OWN = ("adamw_torch", "adamw_torch_fused")

# The optimizers of each package, their plain forms and their classes.
_KNOWN = shipped(__file__, "optimizers.ini")
#: PyTorch's, of matrices alone; AdamW updates the rest. transformers has no name for it, and takes AdamW's.
MUON = "muon"
_OTHERS = " ".join(("adafactor sgd adagrad rmsprop", *_KNOWN["packages"].values(), MUON)).split()
#: By transformers' names, those that need no more than a package; a test holds them against the installed ones.
OPTIMIZERS = (*_PYTORCHS_OWN, *_OTHERS)


def true_optimizer(spec: TrainSpec) -> str:
    """PyTorch's own form of its optimizer, for any type of weights; empty: there is none, and updates are unknown."""
    return next((name for name, same in _KNOWN["true"].items() if spec.optimizer in same.split()), "")


def learnt_by(spec: TrainSpec) -> str:
    """By what its updates are, whichever implementation makes them."""
    return true_optimizer(spec) or spec.optimizer


# Of torch.optim.Muon's, and their products: one with the long side and its way back, one of the short side.
_ITERATIONS = 5


def update_flops(spec: TrainSpec) -> float:
    """Of the products of matrices in an update, as none but Muon makes them: it orthogonalises each hidden matrix by
    Newton and Schulz's iterations. Those of adapters are too thin to count, and a mixture's experts are no matrices."""
    if spec.optimizer != MUON or spec.lora or spec.architecture.sizes is None:
        return 0.0
    sides = [sorted(each) for _, *each in spec.architecture.linear_layers()]
    of_a_layer = sum(4 * short**2 * long + 2 * short**3 for short, long in sides)
    return float(_ITERATIONS * spec.architecture.sizes.num_layers * of_a_layer)


def least_copies(spec: TrainSpec) -> float:
    """How many numbers there are for each weight, at least: itself, its gradient, the optimizer's states."""
    if spec.lora:
        return 1 if spec.lora_base == "as_is" else 0.25
    return 2 + (2 if "adam" in spec.optimizer and "bit" not in spec.optimizer else 0)


def keeps_states_short(spec: TrainSpec) -> bool:
    """Whether the optimizer rounds its states to few bits, once they have made their first update."""
    return spec.optimizer.endswith(("8bit", "4bit"))


def _clash(spec: TrainSpec) -> str | None:
    if spec.optimizer == MUON and is_sharded(spec):
        return f"muon with {spec.parallelism} was never tried here: it takes whole matrices; use parallelism='ddp'"
    return None


def _needs(spec: TrainSpec) -> Package | None:
    for module, optimizers in _KNOWN["packages"].items():
        if spec.optimizer in optimizers.split():
            distribution = _KNOWN["distributions"].get(module, module)
            return Package(module, distribution, distribution)
    return None


def _plain(spec: TrainSpec) -> Mapping[str, Any]:
    known = true_optimizer(spec)
    return {"optimizer": known if known and not keeps_states_short(spec) else spec.optimizer}


def _axis(base: TrainSpec, search: Search) -> Axis:
    same = _PYTORCHS_OWN if base.optimizer in _PYTORCHS_OWN else (base.optimizer,)
    more = [word for word in search.allowed if word in OPTIMIZERS and word not in same]
    return Axis.over("optimizer", [*same, *more])


@dataclass(frozen=True)
class OptimizerEvidence:
    optimizer: str | None = None
    """Its class; empty, or ``NoneType``: there was none."""
    optimizer_fused: bool | None = None
    optimizer_bits: str | None = None
    """Of its states, as bitsandbytes' optimizers tell; empty where the class says it."""
    optimizer_paged: bool = True
    """Old records do not tell."""


def _optimizer(spec: TrainSpec, evidence: Evidence) -> str | None:
    asked, seen = spec.optimizer, claimed(evidence.optimizer.optimizer, "optimizer")
    if asked in _PYTORCHS_OWN:
        fused = claimed(evidence.optimizer.optimizer_fused, "optimizer_fused")
        return equal("optimizer (class, fused)", ("AdamW", asked == "adamw_torch_fused"), (seen, fused))
    if seen in ("", "NoneType"):
        return f"asked for optimizer {asked}, none was seen"
    if not all(part in seen.lower() for part in optimizer_class(asked)):
        return f"asked for optimizer {asked}, the run had {seen}"
    # bitsandbytes has one class for all sizes of state, paged or not; old records do not tell.
    words, told = asked.split("_"), evidence.optimizer.optimizer_bits
    bits = next((word for word in words if word.endswith("bit")), "32bit" if "bnb" in words else "")
    if bits not in seen.lower() and told not in (None, bits):
        return f"asked for optimizer {asked}, the run had {seen} without {bits} states"
    if "paged" in words and not evidence.optimizer.optimizer_paged:
        return f"asked for optimizer {asked}, the run had {seen} without paging"
    return None


def optimizer_class(name: str) -> tuple[str, ...]:
    """What the class of transformers' optimizer ``name`` is called, in parts and small letters; empty: unknown."""
    return tuple(part for word, part in _KNOWN["classes"].items() if word in name.split("_"))


SETTING = Setting(
    name="optimizer",
    fields=("optimizer",),
    values={"optimizer": OPTIMIZERS},
    in_id={"optimizer": "{}"},
    clash=_clash,
    needs=_needs,
    plain=_plain,
    axis=_axis,
    evidence=OptimizerEvidence,
    checks={"optimizer": _optimizer},
)
