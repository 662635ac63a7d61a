"""What one rank saw of its training, and what ranks saw as one: a launch's record is made of it, whoever trained."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_llmperf.records.launch import Launch, RankRecord
from pytest_llmperf.records.learning import UNWANTED as UNINSPECTED
from pytest_llmperf.records.learning import RankLearning
from pytest_llmperf.records.trace import UNWANTED, Trace
from pytest_llmperf.records.trace import merged as merged_traces
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.support.codec import flat

#: Asks a process of a user's own training what it does. SIGUSR1 may be the script's: to save before SLURM ends it.
ASKS = signal.SIGRTMAX - 5


@dataclass(frozen=True)
class Later:
    """One rank's findings after all that is timed."""

    attention_kernel: str = "unknown"
    """The operators that attention calls."""
    trace: Trace = field(default_factory=lambda: Trace(none=UNWANTED))
    learning: RankLearning = field(default_factory=lambda: RankLearning(none=UNINSPECTED))


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One rank's share of a finished run."""

    record: RankRecord
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...] = ()
    """Of the first steps, before clipping."""
    train_seconds: float
    """From the first step's begin to the end of the last one's work, as the host saw it."""
    parameters: int
    evidence: Mapping[str, Any]
    """But for what is seen ``later``."""
    later: Later = field(default_factory=Later)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank of a user's own training leaves: ranks do not talk to one another."""

    world: int
    """How many ranks there are."""
    record: RankRecord
    losses: tuple[float, ...]
    """Of every step; empty where a backward pass did not begin from one number."""
    train_seconds: float
    parameters: int
    evidence: Mapping[str, Any]
    trace: Trace
    loaded: Mapping[str, str]
    """As ``Environment`` has it."""


def launch_of(spec: Spec, started_at: str, first: Trained | Share, by_rank: Sequence[Trace], **seen: Any) -> Launch:
    """The record of ``spec``, without what its launcher alone knows; ``first``: rank 0's, ``by_rank``: traces."""
    return Launch(
        spec_id=spec.id,
        digest=spec.digest,
        started_at=started_at,
        wall_seconds=0.0,
        train_seconds=first.train_seconds,
        warmup_steps=spec.warmup_steps,
        parameters=first.parameters,
        losses=first.losses,
        trace=merged_traces(by_rank),
        **seen,
    )


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
