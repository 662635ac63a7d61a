"""Why a case cannot run here, said before anything is launched. Pure, but for looking up installed packages."""

from __future__ import annotations

from importlib.util import find_spec

from pytest_llmperf.settings import registry
from pytest_llmperf.settings.train_spec import TrainSpec


def why_skip(spec: TrainSpec, *, num_gpus: int, num_cores: int) -> str | None:
    """The reason, or ``None`` where the case can run; ``num_gpus`` 0 is the CPU."""
    if num_gpus and spec.gpus > num_gpus:
        return f"{spec.id} needs {spec.gpus} GPUs, this run may use {num_gpus} (--gpus)"
    if not num_gpus and spec.gpus > num_cores:
        return f"{spec.id} needs {spec.gpus} ranks, this CPU runs {num_cores} at a time"
    why = None if num_gpus else registry.why_not_on_cpu(spec)
    return f"{spec.id}: {why}; run with --gpus {spec.gpus}" if why else missing_package(spec)


def missing_package(spec: TrainSpec) -> str | None:
    """The package that its settings need and this environment does not have, and how to install it."""
    missing = (package for package in registry.packages(spec) if find_spec(package.module) is None)
    return next((f"{spec.id} needs {package.name}: pip install {package.install}" for package in missing), None)
