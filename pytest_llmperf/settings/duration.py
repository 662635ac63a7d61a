"""Duration: how long a training is measured and by what it is judged, which is no part of its work."""

from __future__ import annotations

from pytest_llmperf.settings.setting import Setting, TrainSpec
from pytest_llmperf.support.user_input import A_TOLERANCE, is_tolerance


def _clash(spec: TrainSpec) -> str | None:
    warmup, steps, least = spec.warmup_steps, spec.steps, spec.min_steps
    for name in ("throughput_tolerance", "memory_tolerance"):
        value = getattr(spec, name)
        if value is not None and not is_tolerance(value):
            return f"{name}={value} must be {A_TOLERANCE}"
    if warmup < 1:
        return f"warmup_steps={warmup} must be at least 1: the first step is never steady"
    if warmup >= steps:
        return f"warmup_steps={warmup} leaves no step to measure of steps={steps}; lower it, or raise steps"
    if least > steps and least != type(spec).min_steps:  # the default is nobody's word: steps bounds it
        return f"min_steps={least} is more than steps={steps}; lower it too, or raise steps"
    return None


SETTING = Setting(
    name="duration",
    fields=("steps", "min_steps", "warmup_steps", "throughput_tolerance", "memory_tolerance"),
    least={"steps": 1, "min_steps": 1},
    clash=_clash,
    small=lambda _: {
        "steps": 2,
        "min_steps": 2,
        "warmup_steps": 1,
        "throughput_tolerance": None,
        "memory_tolerance": None,
    },
)
