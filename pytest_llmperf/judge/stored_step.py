"""StoredStep: the static figures that a baseline keeps, and who accepted them when; the file of a case that has never
been launched; both's JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pytest_llmperf.judge.integrity import same_settings
from pytest_llmperf.records.static_step import StaticStep
from pytest_llmperf.support import codec

#: In place of a machine kind, of the figures of a case that has no baseline of any.
ANY_MACHINE: Literal["static"] = "static"


@codec.sparse()
@dataclass(frozen=True, kw_only=True)
class StoredStep:
    """A step that was accepted."""

    step: StaticStep
    recorded_at: str
    """UTC, ISO 8601."""
    reason: str = ""
    revision: str = ""
    """Commit of the tree that it was told of; empty where there is none."""

    def to_plain(self) -> dict[str, Any]:
        values = codec.plain_fields(self)
        return {**values.pop("step"), **values}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> StoredStep:
        accepted = ("recorded_at", "reason", "revision")
        own = {name: value for name, value in values.items() if name in accepted}
        step = {name: value for name, value in values.items() if name not in accepted}
        return codec.read_fields(cls, {"recorded_at": "", **own, "step": codec.read(StaticStep, step)})


@codec.sparse("machine")
@dataclass(frozen=True, kw_only=True)
class StepBaseline:
    """Of a case that has no baseline of any machine kind."""

    id: str
    digest: str
    spec: Mapping[str, Any]
    recorded_by: str
    static: StoredStep
    machine: Literal["static"] = ANY_MACHINE
    on_cpu: bool = False
    """Whether a run of the cases for the CPU recorded it: one of those for GPUs asks for others."""

    noun: ClassVar[str] = "static figures"

    def check(self) -> None:
        same_settings(self.spec, self.digest)
