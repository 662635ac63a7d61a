"""What is known to fail with today's versions: it is launched all the same, and its failure says so."""

from __future__ import annotations

from pytest_llmperf.spec import TrainSpec


def known_failure(spec: TrainSpec) -> str | None:
    """A line about this spec's known failure, or ``None``."""
    if spec.liger and spec.torch_compile:
        return (
            "known: Liger's kernels do not compile under torch.compile with torch 2.11, triton 3.6 and liger-kernel "
            "0.8.5 (Triton CompilationError: 'float' object has no attribute 'to')"
        )
    return None
