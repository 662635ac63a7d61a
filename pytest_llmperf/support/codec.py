"""Records as plain values and back: one codec for every dataclass that stands in a file.

``read`` is strict, ``read_lenient`` leaves out what does not fit; ``load`` and ``keep`` are for files that can be
made anew. A class whose form in files differs from its fields has ``from_plain`` (a class method) and ``to_plain``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeAlias, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from pytest_llmperf.support.files import shipped, write_text
from pytest_llmperf.support.user_input import hint

T = TypeVar("T")

# No count of ours is near it, and sums and ratios of whole numbers below it are numbers.
_MOST = 2.0**63

#: A figure that stays whole where it is: bytes are counted.
Number: TypeAlias = Union[int, float]  # noqa: UP007 - msgspec tells them apart

#: A count, and a figure that sums and ratios are made of: neither is negative.
Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0, lt=_MOST)]

_WIDTH = 40

# msgspec's names of types, and how a sentence calls them.
_WORDS = dict(shipped(__file__, "types.ini")["words"])
_NAMES = {int: "int", float: "float", str: "str", dict: "object", list: "array", tuple: "array", bool: "bool"}

_PLACE = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$(.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.?([^.\[\]]+|\[\.\.\.\]|\[\d+\])")
_WRONG_TYPE = re.compile(r"Expected `(.*?)`((?: of length| [<>]=?) [^,]+)?(?:, got (.*))?")
_MISSING = re.compile(r"Object missing required field `(.*)`")
# In the place of a field that is needed and does not fit.
_EMPTY: Mapping[Any, Any] = {str: "", Mapping: {}, tuple: ()}


def sparse(*kept: str) -> Callable[[type[T]], type[T]]:
    """Mark a dataclass: its fields are absent from files where they have their defaults, but for those ``kept``."""

    def mark(kind: type[T]) -> type[T]:
        setattr(kind, "kept_fields", frozenset(kept))  # noqa: B010 - mypy knows no such field of a class of any kind
        return kind

    return mark


def plain(value: Any) -> Any:
    """``value`` in dicts, lists and scalars; what is none of these and no record stays as it is."""
    if hasattr(value, "to_plain"):
        return value.to_plain()
    if is_dataclass(value):
        return plain_fields(value)
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def plain_fields(record: Any) -> dict[str, Any]:
    """The fields of a record by name, whatever its ``to_plain`` does."""
    values = ((name, getattr(record, name), default) for name, default in _absent(cast("Any", type(record))))
    return {name: plain(value) for name, value, default in values if default is MISSING or value != default}


@cache
def _absent(kind: Any) -> Sequence[tuple[str, Any]]:
    """The fields, each with the value at which it is not written; ``MISSING`` where it always is."""
    kept = getattr(kind, "kept_fields", None)
    found = []
    for one in fields(kind):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        found.append((one.name, MISSING if kept is None or one.name in kept else default))
    return found


def read(kind: type[T], values: object, what: str = "", *, newer: bool = False) -> T:
    """The record that ``values`` hold, ``what`` in errors; ``newer``: unknown fields pass. ValueError: why not."""
    what = what or _name(kind)
    return _converted(kind, values if newer else _ready(kind, values, "", what), values, what)


def read_fields(kind: type[T], values: object, what: str = "") -> T:
    """The same by its fields, whatever its ``from_plain`` does."""
    what = what or _name(kind)
    ready = _ready_fields(kind, values, "", what) if isinstance(values, Mapping) else values
    return _converted(kind, ready, values, what)


def _name(kind: type) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower()
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def _converted(kind: type[T], ready: Any, values: object, what: str) -> T:
    try:
        return msgspec.convert(ready, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, (ValueError, TypeError)):
            raise ValueError(str(error.__cause__)) from error  # the record's own words
        raise ValueError(_sentence(str(error), values, what)) from error
    except UnicodeError as error:
        raise ValueError(f"{what} has a text that UTF-8 cannot hold") from error


def read_lenient(kind: type[T], values: object) -> T | None:
    """The record without what does not fit its types; ``None`` where a field without a default does not."""
    found = _lenient(kind, values)
    return None if found is MISSING else found


def _lenient(kind: Any, value: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeError):  # it takes no text that UTF-8 cannot hold
        return _parts(kind, value)


def _parts(kind: Any, value: Any) -> Any:
    """What of ``value`` fits; ``MISSING`` where that is nothing."""
    origin, inner = get_origin(kind), get_args(kind)
    found: Any = MISSING
    if origin in (UnionType, Union):
        found = next((one for one in (_lenient(each, value) for each in inner) if one is not MISSING), MISSING)
    elif isinstance(value, Mapping) and is_dataclass(kind):
        record, fit = cast("Any", kind), dict[str, Any]()
        for one in fields(record):
            of = _hints(record)[one.name]
            if one.default is MISSING and one.default_factory is MISSING:
                fit[one.name] = _EMPTY.get(get_origin(of) or of, MISSING)
            if one.name in value and (part := _lenient(of, value[one.name])) is not MISSING:
                fit[one.name] = part
        with suppress(TypeError, ValueError):  # a field that it needs is missing, and cannot be empty
            found = record(**{name: part for name, part in fit.items() if part is not MISSING})
    elif isinstance(value, Mapping) and origin is Mapping:
        items = ((name, _lenient(inner[1], item)) for name, item in value.items() if isinstance(name, str))
        found = {name: one for name, one in items if one is not MISSING}
    elif isinstance(value, (list, tuple)) and origin is tuple and inner[-1] is ...:
        found = tuple(one for one in (_lenient(inner[0], item) for item in value) if one is not MISSING)
    return found


def _ready(kind: Any, value: Any, path: str, what: str) -> Any:
    """For msgspec, which lets unknown fields of a dataclass pass: here they are refused. Own forms are read."""
    if not _holds_records(kind):
        return value
    if isinstance(value, Mapping) and is_dataclass(kind):
        if hasattr(kind, "from_plain"):
            try:
                return kind.from_plain(value)
            except ValueError as error:
                raise ValueError(f"{path}: {error}" if path else str(error)) from error
        return _ready_fields(kind, value, path, what)
    origin = get_origin(kind)
    inner = next(one for one in get_args(kind) if _holds_records(one)) if origin else kind
    if isinstance(value, (list, tuple)) and origin is tuple:
        return [_ready(inner, item, f"{path}[{index}]", what) for index, item in enumerate(value)]
    if isinstance(value, Mapping) and origin is Mapping:
        return {name: _ready(inner, item, f"{path} {name!r}", what) for name, item in value.items()}
    return _ready(inner, value, path, what) if origin in (UnionType, Union) else value


def _ready_fields(kind: Any, value: Mapping[str, Any], path: str, what: str) -> dict[str, Any]:
    hints, ready = _hints(kind), {}
    for name, item in value.items():
        if name not in hints:
            raise ValueError(f"{path or what} has {name!r}, which is unknown{hint(str(name), list(hints))}")
        numbers = (one for one in (item if isinstance(item, (list, tuple)) else (item,)) if isinstance(one, int))
        if not all(-_MOST < one < _MOST for one in numbers):
            raise ValueError(f"{name} is {_shown(item)}, which is no figure")
        ready[name] = _ready(hints[name], item, f"{path}.{name}" if path else name, what)
    return ready


@cache
def _holds_records(kind: Any) -> bool:
    return is_dataclass(kind) or any(map(_holds_records, get_args(kind)))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind)}


def _sentence(message: str, values: object, what: str) -> str:
    """What msgspec says, as the reader of a file needs it: the field, what it is, and what was expected."""
    said, path = _PLACE.fullmatch(message).groups()  # type: ignore[union-attr]  # it matches any text
    if found := _MISSING.fullmatch(said):
        return f"{path.removeprefix('.') if path else what} has no {found[1]!r}"
    wrong = _WRONG_TYPE.fullmatch(said)
    places = list(_places(values, _STEP.findall(path or ""), ""))
    got = wrong[3].strip("`") if wrong and wrong[3] else ""
    name, value = next((one for one in places if _NAMES.get(type(one[1]), "null") == got), places[0])
    if not wrong:  # none of the words that a Literal names, or a number that no float holds
        return f"{name or what} is {_shown(value)}, which is unknown"
    expected = " or ".join(_WORDS.get(word, word) for word in wrong[1].split(" | "))
    return f"{name or what} is {_shown(value)}, expected {expected}{wrong[2] or ''}"


def _places(value: Any, steps: Sequence[str], name: str) -> Iterator[tuple[str, Any]]:
    """Where a path of msgspec's leads, each place with its name and value: it does not tell the keys of an object."""
    if not steps:
        yield name, value
    elif steps[0] == "[...]":
        keyed = value.items() if isinstance(value, Mapping) else ((index, item) for index, item in enumerate(value))
        for key, item in keyed:
            yield from _places(item, steps[1:], f"{name} {key!r}")
    elif steps[0].startswith("["):
        yield from _places(value[int(steps[0][1:-1])], steps[1:], name + steps[0])
    else:
        yield from _places(value[steps[0]], steps[1:], f"{name}.{steps[0]}" if name else steps[0])


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value within ``value``, with the names that lead to it: ``config.hidden_act``; an empty object has none."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from flat(item, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def load(kind: type[T], path: Path) -> T | None:
    """The record that ``path`` holds; ``None`` where it is nothing that can be used."""
    try:
        return read(kind, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return None


def keep(path: Path, record: object, *, lasts: bool = False) -> str:
    """Write it; why it could not be, where it could not. ``lasts``: it is on the disk when this returns."""
    try:
        write_text(path, json.dumps(plain(record), indent=1) + "\n", lasts=lasts)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"
