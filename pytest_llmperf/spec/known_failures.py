"""What is known to fail with today's versions: it is launched all the same, and its failure says so."""

from __future__ import annotations

from pytest_llmperf.spec.train_spec import TrainSpec


def known_failure(spec: TrainSpec) -> str | None:
    """A line about this spec's known failure, or ``None``."""
    if spec.liger and spec.torch_compile and spec.torch_compile_scope == "model":
        return (
            "known: Liger under torch.compile fails with torch 2.11, triton 3.6 and liger-kernel 0.8.5 (seen at "
            "micro-batch 37: Triton's CompilationError \"'float' object has no attribute 'to'\", and an illegal memory "
            "access; at micro-batch 1 it trained)"
        )
    return None
