"""What was really active in a launch, read off the objects that trained and not off the request."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedModel, Trainer

from pytest_llmperf.observe.device import is_gpu, room
from pytest_llmperf.settings import fault_injection
from pytest_llmperf.settings.evidence import RunEvidence
from pytest_llmperf.settings.setting import stored_evidence
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.codec import flat
from pytest_llmperf.worker.settings import (
    Training,
    attention,
    compilation,
    data,
    liger,
    optimizer,
    parallelism,
    precision,
    recomputation,
)
from pytest_llmperf.worker.setup import setup


class Witnesses:
    """Who watches a training of ``spec``, one for each setting; made before its Trainer is."""

    def __init__(self, spec: TrainSpec, model: PreTrainedModel) -> None:
        self._witnesses: Mapping[str, Callable[[Training], Any]] = {
            "run": _run,
            "precision": precision.Witness(spec, model),
            "attention": attention.witness,
            "liger": liger.Witness(),
            "compilation": compilation.witness,
            "optimizer": optimizer.witness,
            "recomputation": recomputation.witness,
            "parallelism": parallelism.witness,
            "data": data.witness,
            "setup": lambda training: {"setup": setup(training.trainer, training.model, training.optimizer)},
        }

    #: Tried last of all.
    attention_kernel = staticmethod(attention.attention_kernel)

    def collect(self, trainer: Trainer, model: PreTrainedModel) -> dict[str, Any]:
        """All that they saw, as a record holds it; called once, after all that is timed."""
        training = Training(trainer, model)
        return gathered({name: partial(witness, training) for name, witness in self._witnesses.items()})


def _run(training: Training) -> RunEvidence:
    return RunEvidence(
        device_type=training.device.type,
        injected=os.environ.get(fault_injection.VARIABLE, ""),
        allocator_retries=room().retries if is_gpu(training.device) else 0,
        found=attention.found_settings(),
    )


def gathered(collectors: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return what ``collectors`` found, evidence or a mapping.

    One that raises takes nothing from a measurement: its error is in ``uncollected``.
    """
    found: dict[str, Any] = {}
    uncollected: dict[str, str] = {}
    for name, collector in collectors.items():
        try:
            seen = collector()
            found |= seen if isinstance(seen, Mapping) else stored_evidence(seen)
        except Exception as error:  # noqa: BLE001 - whatever an upgrade or a setting of the user's made of its object
            uncollected[name] = f"{type(error).__name__}: {error}"
    return found | ({"uncollected": uncollected} if uncollected else {})


# Ranks need not compile alike: the worst of them counts.
_COUNTS: Mapping[str, Callable[[Iterable[int]], int]] = {
    "compiled_graphs": min,
    "graph_breaks": max,
    "recompilations": max,
    "allocator_retries": max,
    "checkpoint_bytes": max,
}

# Ranks of one training may run on processors of two generations; what that does is seen in the clock.
_OF_THE_HOST = frozenset({"setup.torch.cpu_capability"})


def merged(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rank 0's evidence; what other ranks saw differently is in ``other_ranks``, by name and then by rank."""
    worst = {name: of(seen[name] for seen in by_rank) for name, of in _COUNTS.items() if name in by_rank[0]}
    facts = [dict(flat({name: seen[name] for name in seen if name not in _COUNTS})) for seen in by_rank]
    others: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(name for seen in facts for name in seen if name not in _OF_THE_HOST):
        first = facts[0].get(name)
        for rank, seen in enumerate(facts):
            own = seen.get(name)
            if own != first and "unknown" not in (own, first):
                others.setdefault(name, {})[str(rank)] = own
    return {**by_rank[0], **worst, **({"other_ranks": others} if others else {})}
