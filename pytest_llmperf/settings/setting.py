"""What a setting says of itself: values, words in ids, what it cannot be with, what it needs, what must be seen.

A file of this folder that ends with ``SETTING`` is all of one setting, or of two that are near; ``worker/settings/``
has the twin of each by its name, which applies it and witnesses it. ``registry.py`` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_llmperf.support import codec

if TYPE_CHECKING:  # both are made of settings, whose functions only take them
    from pytest_llmperf.settings.registry import Evidence
    from pytest_llmperf.settings.train_spec import TrainSpec
else:
    Evidence = TrainSpec = Any

__all__ = ["Evidence", "TrainSpec"]  # for the settings, beside what is defined here


class SpecError(ValueError):
    """A training configuration that cannot be, in one line."""

    def __init__(self, why: str, *, is_clash: bool = False) -> None:
        super().__init__(why)
        self.is_clash = is_clash  # each of its values may be, beside others


def is_refusal(caught: Any) -> bool:
    """For pytest's ``__tracebackhide__``: such an error is about the caller's line."""
    return caught is not None and caught.errisinstance(SpecError)


@dataclass(frozen=True)
class Choice:
    """What one choice of a search sets: fields of a TrainSpec; its name is for people, beside the axis' own."""

    name: str
    fields: tuple[tuple[str, Any], ...]

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether a spec with these ``values`` has made this choice."""
        return all(values.get(name) == value for name, value in self.fields)


@dataclass(frozen=True)
class Axis:
    """One decision about a training, and its choices."""

    name: str
    choices: tuple[Choice, ...]

    @classmethod
    def of(cls, name: str, choices: Mapping[str, Mapping[str, Any]]) -> Axis:
        """By the names of its choices, the fields that each sets."""
        return cls(name, tuple(Choice(word, tuple(fields.items())) for word, fields in choices.items()))

    @classmethod
    def over(cls, field: str, values: Sequence[Any]) -> Axis:
        """Of one ``field`` of a TrainSpec."""
        words = [str(value).lower() if value is None or isinstance(value, bool) else str(value) for value in values]
        return cls(field, tuple(Choice(word, ((field, value),)) for word, value in zip(words, values, strict=True)))

    @property
    def fields(self) -> frozenset[str]:
        return frozenset(name for choice in self.choices for name, _ in choice.fields)


@dataclass(frozen=True)
class Search:
    """What a search for a faster training may change."""

    on_cpu: bool
    allowed: tuple[str, ...] = ()
    """Words of trainings that need not learn as the spec's own does."""
    fixed: frozenset[str] = frozenset()
    global_batch: int | None = None
    """Sequences of all ranks for one step; ``None``: as many as fit."""


@dataclass(frozen=True)
class Package:
    """What a setting needs installed: a module, its name for people, and what pip is given."""

    module: str
    name: str
    install: str
    preload: str = ""
    """The word by which a server imports it ahead of a launch; empty: it does not."""


class NotClaimedError(LookupError):
    """A training's evidence does not say it."""


_T = TypeVar("_T")


def claimed(value: _T | None, name: str) -> _T:
    """``value``, whose key is ``name``; a ``NotClaimedError`` where the evidence does not say it."""
    if value is None:
        raise NotClaimedError(name)
    return value


def equal(what: str, asked: object, seen: object) -> str | None:
    return None if asked == seen else f"asked for {what} {asked}, the run had {seen}"


Fields = Callable[[TrainSpec], Mapping[str, Any]]


def at_default(*names: str) -> Fields:
    """These fields as a spec has them that does not name them."""
    return lambda spec: {name: getattr(type(spec), name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Setting:
    name: str
    """Of its twin's file in the worker, and of its evidence."""
    fields: Sequence[str]
    """Of TrainSpec, which are decided together."""
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    least: Mapping[str, int] = field(default_factory=dict)
    """By field the smallest number that it may be."""
    in_id: Mapping[str, str | Callable[[TrainSpec], str]] = field(default_factory=dict)
    """By field what an id says of it: words with its value, where that is not the default; or whatever is returned."""
    problems: Callable[[TrainSpec], Iterator[str]] = lambda _: iter(())
    """Why its values cannot be, whatever the others are; before the spec has an id."""
    switch: str = ""
    """The field that is off by default, and without which those of ``switched`` change nothing."""
    switched: Sequence[str] = ()
    clash: Callable[[TrainSpec], str | None] = lambda _: None
    """Why it cannot be with the model or with other settings, and what to do instead."""
    why_not_on_cpu: Callable[[TrainSpec], str | None] = lambda _: None
    needs: Callable[[TrainSpec], Package | None] = lambda _: None
    small: Fields = lambda _: {}
    """Its fields in a spec made small for parity."""
    plain: Fields = lambda _: {}
    """Its fields where nothing makes the training fast."""
    in_fp32: Fields = lambda _: {}
    """Its fields in fp32, where they differ."""
    axis: Callable[[TrainSpec, Search], Axis | None] = lambda *_: None
    evidence: type[Any] | None = None
    """What a training tells of it: a dataclass whose fields are the keys of the stored evidence."""
    checks: Mapping[str, str | Callable[[TrainSpec, Evidence], str | None]] = field(default_factory=dict)
    """By field, why what was seen contradicts the spec, or words for what must equal it; can be declared inactive."""
    lost: Callable[[TrainSpec, Sequence[Evidence], Sequence[Evidence]], str | None] = lambda *_: None
    """What launches had no more of what their baseline's had."""


def read_evidence(kind: type[_T], stored: Mapping[str, Any]) -> _T:
    """The ``kind`` of evidence that a record holds; what is not there, or of another type, is not claimed. A field
    whose metadata have ``null`` is written as null where it has that value."""
    nulls = {each.name: each.metadata.get("null") for each in fields(kind)}  # type: ignore[arg-type]
    found = {name: stored[name] if stored[name] is not None else null for name, null in nulls.items() if name in stored}
    return codec.read_lenient(kind, {name: value for name, value in found.items() if value is not None}) or kind()


def stored_evidence(evidence: Any) -> dict[str, Any]:
    """As a record holds it: what is not claimed, and an empty object, is left out."""
    values = ((each, getattr(evidence, each.name)) for each in fields(evidence))
    return {
        each.name: None if "null" in each.metadata and value == each.metadata["null"] else value
        for each, value in values
        if value is not None and value != {}
    }


def gathered(collectors: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """What ``collectors`` found, evidence or a mapping; the error of one that raises is in ``uncollected``."""
    found, uncollected = dict[str, Any](), dict[str, str]()
    for name, collector in collectors.items():
        try:
            seen = collector()
            found |= seen if isinstance(seen, Mapping) else stored_evidence(seen)
        except Exception as error:  # noqa: BLE001 - whatever an upgrade or a setting of the user's made of its object
            uncollected[name] = f"{type(error).__name__}: {error}"
    return found | ({"uncollected": uncollected} if uncollected else {})
