"""How a launch goes: its progress while it runs, and why it ended without a record."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal

from pytest_llmperf.records.calibration import Health
from pytest_llmperf.records.launch import Environment
from pytest_llmperf.support import grouped
from pytest_llmperf.support.files import shipped
from pytest_llmperf.support.redaction import without_secrets

#: The minutes of a soak are over, and so its launcher has ended it: all that it was asked for.
SOAKED = "soaked"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A launch that yielded no record, and why."""

    kind: str
    """``oom``, ``error`` (an exception in a rank), ``refused`` (a model that transformers does not train so),
    ``killed`` (a signal), ``timeout``, ``never-started``, ``unwritable`` (its folder), on several nodes ``rendezvous``
    or ``node-failure``; and ``SOAKED``, which is none."""
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
        what = "refused" if self.kind == "refused" else f"launch failed ({self.kind})"
        return f"{what}: {self.message}"


class LaunchFailed(Exception):  # noqa: N818 - it names the event
    """A launch that should have yielded a record did not."""

    def __init__(self, spec_id: str, failure: Failure, **seen: Any) -> None:
        """``seen``: fields of its result, of one that yields some even so."""
        self.spec_id, self.failure, self.seen = spec_id, failure, seen
        lines = [f"{spec_id}: {seen.get('reason', failure.reason)}"]
        lines += [f"  | {line}" for line in failure.tail]
        # Of a refusal they hold nothing more.
        lines += [f"logs: {failure.folder}"] if failure.kind != "refused" else []
        super().__init__("\n".join(lines))


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a running launch is; for the live line."""

    phase: str
    """``starting``, or one of ``_BEGUN``."""
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
    stepped: float = 0.0
    """When it first told of its last step, in seconds since 1970; 0 as long as it has made none."""
    compiles: bool = False

    @property
    def trained_seconds(self) -> float:
        """From where its first step began to the end of its last; 0 as long as it has made none."""
        return self.stepped - self.reached["training"] if self.step and "training" in self.reached else 0.0

    @property
    def trained_until(self) -> float:
        """When its training ended, in seconds since 1970; 0 as long as it has not."""
        return self.reached.get("finishing", 0.0)


# Phases: where the seconds of a launch went, and those of a whole run. Pure.

#: Until its hardware was free. The only phase before the launch itself, and no part of its ``wall_seconds``.
WAITING = "waiting_for_hardware"
#: From the request to rank 0's first line: interpreters, or the rest of a fork server's imports; torchrun; rendezvous.
START = "start"
#: torch, the Trainer and what both import; nothing of it where the launch is warm.
IMPORTS = "imports"
#: What the GPU gives to work that does not depend on what is under test, where that was not measured yet that day.
CALIBRATION = "calibration"
#: Until the first step, without the calibration: CUDA, process group, canary, the model and what is wrapped around it.
MODEL = "model"
#: Compilation, autotuning and the allocator's growth among it.
FIRST_STEP = "first_step"
#: All others, to the end of the device's work.
STEPS = "steps"
#: Steps that are traced, after those that are timed.
TRACE = "trace"
#: One more, that is looked at to see whether training learns.
INSPECTION = "inspection"
#: Evidence, the record, the end of all processes; what of it comes before the traced steps, too. Where launches overlap
#: that is what the next one waits for.
END = "end"
#: What else a run spends, and no record has: on launches that left none, on looking for the largest micro-batch in one
#: process and in predictions, on small trainings beside the plain form, and what nobody told of.
FAILED, SEARCHING, COMPARING, OTHER = "failed_launches", "searching", "comparing", "other"
#: Those that baselines keep of a launch, and hold later ones against; the others are the machine's, or are metrics.
HELD = (START, IMPORTS, MODEL)

# By what rank 0 says that it does, in that order; where its first step ends is told by its clock.
_BEGUN = dict(shipped(__file__, "begun.ini")["phases"])

_DECIMALS = 3
# Less is what rounding leaves.
_ROUNDED = 0.01


def phases_of(
    began: float, seconds: float, reached: Mapping[str, float], first_step_seconds: float
) -> dict[str, float]:
    """Phases of a launch that ``began`` then and took ``seconds``, their sum; none where rank 0 told none. ``reached``:
    when it began to do what, in seconds since 1970. Whatever it says, no phase is negative."""
    if not (told := [(name, reached[word] - began) for word, name in _BEGUN.items() if word in reached]):
        return {}
    begins = [(START, 0.0)]
    for (name, at), (_, after) in pairwise([*told, ("", seconds)]):
        begins.append((name, at))
        if name == FIRST_STEP:
            begins.append((STEPS, min(at + first_step_seconds, after)))
    # Neither before the phase that comes first, nor after the end.
    marks = accumulate((min(at, seconds) for _, at in [*begins, ("", seconds)]), max)
    phases: dict[str, float] = {}
    for (name, _), (begin, end) in zip(begins, pairwise(round(mark, _DECIMALS) for mark in marks), strict=True):
        phases[name] = round(phases.pop(name, 0.0) + end - begin, _DECIMALS)  # where it is for the last time
    return phases


def accounted(record: Mapping[str, float], waited: float, seconds: float, remainder: str) -> dict[str, float]:
    """A launch's part of a run's sum: the phases of its ``record``, if it left one; as ``remainder`` the rest."""
    known = {WAITING: waited, **record}
    rest = seconds + known[WAITING] - total(known)
    return {**known, remainder: rest} if rest > _ROUNDED else known


def total(phases: Mapping[str, float]) -> float:
    return sum(phases.values())


def summed(several: Iterable[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(each) for name, each in grouped(pair for one in several for pair in one.items()).items()}


# Shortage: how a lack of memory is known, by what is said when it ends and by what was left then. Pure.
Said = Literal["plainly", "perhaps", ""]

_SAID = {
    name: "|".join(filter(None, told.split("\n"))) for name, told in shipped(__file__, "shortage.ini")["said"].items()
}


def said(words: str) -> Said:
    """Whether ``words`` say that memory ended."""
    text = re.sub(_SAID["something else"], "", words.lower())
    if re.search(_SAID["plainly"], text):
        return "plainly"
    return "perhaps" if re.search(_SAID["perhaps"], text) else ""


_ERRNOS: Mapping[int | None, Said] = {errno.ENOMEM: "plainly", errno.EAGAIN: "perhaps"}
# Raised by Python's code, which speaks of memory and has it.
_OF_PYTHON = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError, ValueError)


def meanings(error: BaseException | None) -> set[Said]:
    """What ``error`` says of that, and what it was raised from or while handling: a library may say it in its words."""
    seen: dict[int, Said] = {}
    while error is not None and id(error) not in seen:
        seen[id(error)] = _meaning(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return {*seen.values()}


def _meaning(error: BaseException) -> Said:
    if isinstance(error, _OF_PYTHON):
        return ""
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return _ERRNOS[error.errno]
    # By name, since the import of torch itself may be what failed; Triton's resources come under that name too.
    is_its_kind = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return said(f"out of memory: {error}" if is_its_kind else str(error))


def of_a_peer(words: str) -> bool:
    """Whether ``words`` are of another rank that has gone, which says nothing of this one's memory."""
    return re.search(_SAID["of a peer"], words.lower()) is not None


# Of a rank's own limit: what failed did not fit any more, so a product's workspace may be left where a library only
# hints, and hardly a layer's where nothing was said. CUDA's libraries and NCCL's take less than it.
_LITTLE = {"its limit": 1 / 4, "the GPU": 0.02, "the host": 0.02}
_NOTHING = {"its limit": 1 / 16, "the GPU": 0.02, "the host": 0.02}


@dataclass(frozen=True)
class Room:
    """The memory that is left to a rank."""

    of: Literal["its limit", "the GPU", "the host"]
    limit_bytes: int
    left_bytes: int
    retries: int = 0
    """Times that the GPU's allocator gave back what it had kept and asked again."""
    refused: int = 0
    """Times that it got nothing all the same."""

    @property
    def is_tight(self) -> bool:
        """Whether so little is left that a hint of a lack of memory is believed."""
        return self.is_full or self.retries > 0 or self.share < _LITTLE[self.of]

    @property
    def is_full(self) -> bool:
        """Whether an error without a word of memory is taken for a lack of it."""
        in_need = self.of != "the GPU" or self.retries > 0
        return self.refused > 0 or (in_need and self.share < _NOTHING[self.of])

    @property
    def share(self) -> float:
        return self.left_bytes / self.limit_bytes if self.limit_bytes else 1.0

    def __str__(self) -> str:
        """``2.1 of 150.0 MiB of its limit were left``."""
        unit, name = (2**30, "GiB") if self.limit_bytes >= 2**30 else (2**20, "MiB")
        asked = f", and allocations were refused: {self.refused}" if self.refused else ""
        return f"{self.left_bytes / unit:.1f} of {self.limit_bytes / unit:.1f} {name} of {self.of} were left{asked}"


# What native code throws arrives as one of these.
_NATIVE = (RuntimeError, OSError, SystemError, ImportError)


def lack_of_memory(error: BaseException, left: Callable[[], Iterable[Room]]) -> str | None:
    """How it is known that memory ran out: empty where ``error`` says so itself; ``None`` where it is another error.
    One that only hints at it, or that native code raised and that says nothing, is judged by what is ``left``."""
    if not isinstance(error, Exception):
        return None
    if "plainly" in (meant := meanings(error)):
        return ""
    if not isinstance(error, _NATIVE) or of_a_peer(str(error)):
        return None
    hinted = "perhaps" in meant
    return next((str(room) for room in left() if room.is_full or (hinted and room.is_tight)), None)
