"""How a launch goes: its progress while it runs, and why it ended without a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_llmperf.records.launch import Environment, Health
from pytest_llmperf.support.redaction import without_secrets


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A launch that yielded no record, and why."""

    kind: str
    """``oom``, ``error`` (an exception in a rank), ``refused`` (a model that transformers does not train so),
    ``killed`` (a signal), ``timeout``, ``never-started``, ``unwritable`` (its folder), and on several nodes
    ``rendezvous`` or ``node-failure``."""
    message: str
    """One line: which rank, what, after how long."""
    tail: tuple[str, ...]
    """The failing rank's last lines."""
    folder: str
    """Where its logs and records are kept."""
    rank: int | None = None
    health: Health = field(default_factory=Health)
    """What else happened on its hardware, as far as somebody looked: a neighbour may hold the memory it lacked."""
    environment: Environment | None = None
    """Where its rank 0 ran, as far as it came."""
    lost_nodes: tuple[str, ...] = ()
    """Nodes of its job that answer nobody any more, and without which it could not run: others may stand in."""

    def __post_init__(self) -> None:
        # What a rank said is told, kept and mailed from here on.
        object.__setattr__(self, "message", without_secrets(self.message))
        object.__setattr__(self, "tail", tuple(map(without_secrets, self.tail)))

    @property
    def reason(self) -> str:
        """How the launch ended, in one line."""
        what = "refused" if self.kind == "refused" else f"launch failed ({self.kind})"
        return f"{what}: {self.message}"


class LaunchFailed(Exception):  # noqa: N818 - it names the event
    """A launch that should have yielded a record did not."""

    def __init__(self, spec_id: str, failure: Failure) -> None:
        self.spec_id, self.failure = spec_id, failure
        lines = [f"{spec_id}: {failure.reason}"]
        lines += [f"  | {line}" for line in failure.tail]
        # Of a refusal they hold nothing more.
        lines += [f"logs: {failure.folder}"] if failure.kind != "refused" else []
        super().__init__("\n".join(lines))


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a running launch is; for the live line."""

    phase: str
    """``starting``, ``importing``, ``building``, ``calibrating``, ``assembling``, ``training`` or ``finishing``."""
    step: int = 0
    """Steps the host has finished issuing."""
    steps: int = 0
    tokens_per_second: float = 0.0
    """Over all ranks, estimated from the progress itself; 0 while unknown."""
    reserved_bytes: int = 0
    """Of rank 0, now."""
    reached: Mapping[str, float] = field(default_factory=dict)
    """When it came to each of its phases, ``starting`` left out, in seconds since 1970."""
    phase_seconds: float = 0.0
    """For how long it had been in ``phase`` when it told."""
    compiles: bool = False
    """Whether the first step compiles kernels."""

    @property
    def trained_until(self) -> float:
        """When its training ended, in seconds since 1970; 0 as long as it has not."""
        return self.reached.get("finishing", 0.0)
