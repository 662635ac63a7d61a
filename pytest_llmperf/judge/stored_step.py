"""StoredStep: the static figures that a baseline keeps, and who accepted them when; the file of a case that has never
been launched; both's JSON. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_llmperf.judge.baseline_file import SCHEMA, BaselineError, dump, parse, refusing
from pytest_llmperf.judge.integrity import same_settings
from pytest_llmperf.records.static_step import StaticStep

#: In place of a machine kind, of the figures of a case that has no baseline of any.
ANY_MACHINE = "static"


@dataclass(frozen=True, kw_only=True)
class StoredStep:
    """A step that was accepted."""

    step: StaticStep
    recorded_at: str
    """UTC, ISO 8601."""
    reason: str = ""
    revision: str = ""
    """Commit of the tree that it was told of; empty where there is none."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        accepted = {"recorded_at": self.recorded_at, "reason": self.reason, "revision": self.revision}
        return {**self.step.to_dict(), **{name: value for name, value in accepted.items() if value}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StoredStep:
        """As ``to_dict`` wrote it.

        Raises:
            ValueError: it was not, or it was edited since.
        """
        if not isinstance(values, Mapping):
            raise ValueError("its static figures are no object")
        own = ("recorded_at", "reason", "revision")
        step = StaticStep.from_dict({name: value for name, value in values.items() if name not in own})
        return cls(step=step, **{name: str(values.get(name, "")) for name in own})


@dataclass(frozen=True, kw_only=True)
class StepBaseline:
    """Of a case that has no baseline of any machine kind."""

    id: str
    digest: str
    spec: Mapping[str, Any]
    recorded_by: str
    static: StoredStep
    on_cpu: bool = False
    """Whether a run of the cases for the CPU recorded it: one of those for GPUs asks for others."""

    def to_json(self) -> str:
        """As other baselines are written."""
        return dump(
            {
                "schema": SCHEMA,
                "id": self.id,
                "digest": self.digest,
                "machine": ANY_MACHINE,
                "spec": dict(self.spec),
                "recorded_by": self.recorded_by,
                "static": self.static.to_dict(),
                **({"on_cpu": True} if self.on_cpu else {}),
            }
        )

    @classmethod
    def from_json(cls, text: str, source: str) -> StepBaseline:
        """The figures in ``text``; ``source`` names it in errors.

        Raises:
            BaselineError: empty, truncated, of a newer schema, or of something else.
        """
        document = parse(text, source)
        with refusing(source, "static figures"):
            if document["machine"] != ANY_MACHINE:
                raise BaselineError(f"{source}: it is of machine {document['machine']}, expected {ANY_MACHINE}")
            same_settings(document)
            return cls(
                **{name: document[name] for name in ("id", "digest", "recorded_by")},
                spec=dict(document["spec"]),
                static=StoredStep.from_dict(document["static"]),
                on_cpu=document.get("on_cpu") is True,
            )
