"""Shape: whether what a file holds can be a record's fields, said in the words of whoever opens that file. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, cast

from pytest_llmperf.support.suggestions import hint

# By an annotation's first word; another is of a record that is looked at by itself.
_TYPES: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "str": (str, "text"),
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "Mapping": (Mapping, "an object"),
    "tuple": ((list, tuple), "a list"),
    "bool": (bool, "true or false"),
}

# What is of this very type is fit; of another, or a whole number, there is more to ask.
_EXACT: Mapping[str, frozenset[type]] = {"str": frozenset({str}), "float": frozenset({float})}

# No count of ours is near it, and sums and ratios of whole numbers below it are numbers.
_MOST = 2**63

_WIDTH = 40


def fields_of(kind: type, values: object, what: str) -> dict[str, Any]:
    """``values``, found fit for the dataclass ``kind``; ``what`` names them in errors.

    Raises:
        ValueError: they are no object, or a field is missing, unknown or of another type.
    """
    kinds, needed = _fields(kind)
    checked = typed(values, kinds, what)
    for name in needed:
        if name not in checked:
            raise ValueError(f"{what} has no {name!r}")
    for name in checked:
        if name not in kinds:
            raise ValueError(f"{what} has {name!r}, which is unknown{hint(name, list(kinds))}")
    return checked


@cache
def _fields(kind: type) -> tuple[Mapping[str, str], Sequence[str]]:
    """The annotations of its fields, and which have no default. A file holds hundreds of one kind."""
    known = fields(kind)
    needed = [each.name for each in known if each.default is MISSING and each.default_factory is MISSING]
    return {each.name: str(each.type) for each in known}, needed


def typed(values: object, kinds: Mapping[str, str], what: str) -> dict[str, Any]:
    """``values``, where those that are there are of their ``kinds``, each as an annotation says it.

    Raises:
        ValueError: they are no object, or one is of another type.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{what} is {_shown(values)}, expected an object")
    for name, kind in kinds.items():
        if name in values:
            _check(name, values[name], kind)
    return dict(values)


def _check(name: str, value: object, kind: str) -> None:
    base, inner = _parts(kind)
    if base not in _TYPES:
        return
    types, words = _TYPES[base]
    if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
        raise ValueError(f"{name} is {_shown(value)}, expected {words}")
    if isinstance(value, int) and abs(value) >= _MOST:
        raise ValueError(f"{name} is {_shown(value)}, which is no figure")
    if base == "Mapping":
        items = cast("Mapping[str, object]", value)
        if not _are_plain(items.values(), inner):
            for key, item in items.items():
                _check(f"{name} {key!r}", item, inner)
    elif base == "tuple":
        values = cast("Sequence[object]", value)
        if not _are_plain(values, inner):
            for item in values:
                _check(f"one of {name}", item, inner)


@cache
def _parts(kind: str) -> tuple[str, str]:
    """An annotation's first word, and the annotation of what that holds."""
    base, _, inner = kind.removesuffix("]").partition("[")
    return base, inner.rpartition(", ")[2] if base == "Mapping" else inner.partition(",")[0]


def _are_plain(values: Iterable[object], kind: str) -> bool:
    """Whether no value needs a look of its own: most of a file is lists of numbers that are what they should be."""
    base, _ = _parts(kind)
    return base not in _TYPES or {*map(type, values)} <= _EXACT.get(base, frozenset())


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value within ``value``, with the names that lead to it: ``config.hidden_act``; an empty object has none."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from flat(item, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"
