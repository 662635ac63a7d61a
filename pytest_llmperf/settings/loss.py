"""Loss: the model's own over all logits at once, or one that never holds all of them."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_llmperf.settings.liger import LOSS
from pytest_llmperf.settings.precision import is_16_bit
from pytest_llmperf.settings.setting import Package, Setting, TrainSpec, at_default, equal

#: ``chunked``: a part of the tokens at a time, its logits made again for the backward; ``cut``: cut cross-entropy.
_LOSSES = ("model", "chunked", "cut")
_CUT = Package("cut_cross_entropy", "cut-cross-entropy", "cut-cross-entropy")


def _clash(spec: TrainSpec) -> str | None:
    if spec.loss == "model":
        return None
    if spec.liger and (spec.liger_kernels == "all" or {"cross_entropy", LOSS} & {*spec.liger_kernels.split("+")}):
        return f"loss={spec.loss!r} replaces what Liger does; name others in liger_kernels, or use loss='model'"
    if spec.loss == "cut" and not is_16_bit(spec):
        return "cut cross-entropy multiplies in 16 bits; use bf16 or fp16, or loss='chunked'"
    return None


@dataclass(frozen=True)
class LossEvidence:
    loss: str | None = None
    """Nothing of the model's own."""


SETTING = Setting(
    name="loss",
    fields=("loss",),
    values={"loss": _LOSSES},
    in_id={"loss": "{}-loss"},
    clash=_clash,
    why_not_on_cpu=lambda spec: "cut cross-entropy's Triton kernels need a GPU" if spec.loss == "cut" else None,
    needs=lambda spec: _CUT if spec.loss == "cut" else None,
    plain=at_default("loss"),
    in_fp32=lambda spec: {"loss": "chunked" if spec.loss == "cut" else spec.loss},
    evidence=LossEvidence,
    checks={"loss": lambda spec, evidence: equal("loss", spec.loss, evidence.loss.loss or "model")},
)
