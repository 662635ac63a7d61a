"""Shape: whether what a file holds can be a record's fields, said in the words of whoever opens that file. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

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

# No count of ours is near it, and sums and ratios of whole numbers below it are numbers.
_MOST = 2**63

_WIDTH = 40


def fields_of(kind: type, values: object, what: str) -> dict[str, Any]:
    """``values``, found fit for the dataclass ``kind``; ``what`` names them in errors.

    Raises:
        ValueError: they are no object, or a field is missing, unknown or of another type.
    """
    checked = typed(values, {field.name: str(field.type) for field in fields(kind)}, what)
    for field in fields(kind):
        if field.name not in checked and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{what} has no {field.name!r}")
    known = [field.name for field in fields(kind)]
    for name in checked:
        if name not in known:
            raise ValueError(f"{what} has {name!r}, which is unknown{hint(name, known)}")
    return checked


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
    base, _, inner = kind.removesuffix("]").partition("[")
    if base not in _TYPES:
        return
    types, words = _TYPES[base]
    if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
        raise ValueError(f"{name} is {_shown(value)}, expected {words}")
    if isinstance(value, int) and abs(value) >= _MOST:
        raise ValueError(f"{name} is {_shown(value)}, which is no figure")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check(f"{name} {key!r}", item, inner.rpartition(", ")[2])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check(f"one of {name}", item, inner.partition(",")[0])


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
