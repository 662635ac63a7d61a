"""Compilation: torch.compile, of the whole model or layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_llmperf.settings.setting import (
    Axis,
    Choice,
    Evidence,
    Search,
    Setting,
    TrainSpec,
    at_default,
    claimed,
    equal,
)

# ``layers`` compiles each repeated layer by itself and leaves the rest alone: PyTorch's regional compilation.
_SCOPES = ("model", "layers")
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_FIELDS = ("torch_compile", "torch_compile_mode", "torch_compile_scope")


def is_autotuned(mode: str) -> bool:
    """Whether the compiler chooses kernels by timing them: nearly tied ones change from process to process."""
    return mode.startswith("max-autotune")


def is_compiled(spec: TrainSpec) -> bool:
    """Whether torch.compile compiles it, or a part of it."""
    return spec.torch_compile


def times_kernels(spec: TrainSpec) -> bool:
    """Whether its compiler does, which takes minutes."""
    return spec.torch_compile and is_autotuned(spec.torch_compile_mode)


def _axis(base: TrainSpec, _search: Search) -> Axis:
    choices = [Choice.of("no", **at_default(*_FIELDS)(base))]
    for mode in _MODES:
        for scope in reversed(_SCOPES):
            name = scope if mode == "default" else f"{scope} {mode}"
            choices.append(Choice.of(name, torch_compile=True, torch_compile_scope=scope, torch_compile_mode=mode))
    return Axis("compile", tuple(choices))


@dataclass(frozen=True)
class CompilationEvidence:
    """What the compiler did; records from before a field did what is its default now."""

    torch_compile: bool | None = None
    torch_compile_mode: str = "default"
    """Empty: not compiled. The same of the scope."""
    torch_compile_scope: str = "model"
    compiled_modules: Sequence[str] | None = None
    """The kinds of the modules that are compiled, each by itself."""
    compiled_graphs: int | None = None
    graph_breaks: int | None = None
    recompilations: int | None = None

    @property
    def is_compiled(self) -> bool:
        return bool(self.compiled_graphs or self.torch_compile)


def _compile(spec: TrainSpec, evidence: Evidence) -> str | None:
    seen = evidence.compilation
    line = equal("torch_compile", spec.torch_compile, claimed(seen.torch_compile, "torch_compile"))
    if line or not spec.torch_compile:
        return line
    if seen.compiled_graphs == 0:
        return "asked for torch_compile, no graph was compiled"
    mode = equal("torch_compile's mode", spec.torch_compile_mode, seen.torch_compile_mode)
    return mode or equal("torch_compile's scope", spec.torch_compile_scope, seen.torch_compile_scope)


SETTING = Setting(
    name="compilation",
    fields=_FIELDS,
    values={"torch_compile_mode": _MODES, "torch_compile_scope": _SCOPES},
    in_id={"torch_compile": "compile", "torch_compile_scope": "{}", "torch_compile_mode": "{}"},
    switch="torch_compile",
    switched=_FIELDS[1:],
    plain=at_default(*_FIELDS),
    axis=_axis,
    evidence=CompilationEvidence,
    checks={"torch_compile": _compile},
)
