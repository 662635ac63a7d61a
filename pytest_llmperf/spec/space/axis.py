"""Axis: one decision about a training, and the choices that there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Choice:
    """What one choice sets."""

    name: str
    """For people, beside the axis' name."""
    fields: tuple[tuple[str, Any], ...]
    """Of a TrainSpec."""

    @classmethod
    def of(cls, name: str, **fields: Any) -> Choice:
        """It sets ``fields``."""
        return cls(name, tuple(fields.items()))

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether a spec with these ``values`` has made this choice."""
        return all(values.get(name) == value for name, value in self.fields)


@dataclass(frozen=True)
class Axis:
    """One decision."""

    name: str
    choices: tuple[Choice, ...]

    @classmethod
    def over(cls, field: str, values: Iterable[Any]) -> Axis:
        """Of one ``field`` of a TrainSpec."""
        return cls(field, tuple(Choice(_word(value), ((field, value),)) for value in values))

    @property
    def fields(self) -> frozenset[str]:
        """What its choices set."""
        return frozenset(name for choice in self.choices for name, _ in choice.fields)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)
