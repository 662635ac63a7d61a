"""A space of one's own: axes as TOML, or as data in Python, made the same way.

```toml
[axes]
micro_batch_size = [8, 16, 32]
attention = ["sdpa", "flash_attention_2"]

[axes.liger]                      # a decision about several fields: its choices by name
off = { liger = false }
loss = { liger = true, liger_kernels = "fused_linear_cross_entropy" }
```
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pytest_llmperf.spec.space.axis import Axis, Choice
from pytest_llmperf.spec.train_spec import SpecError, TrainSpec, precision_fields
from pytest_llmperf.support.suggestions import hint

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_KNOWN = tuple(one.name for one in fields(TrainSpec))
_MODEL = "model"
_HOW_TO_MEASURE = frozenset("steps min_steps warmup_steps throughput_tolerance memory_tolerance".split())
_PRECISION = "precision"
"""The fixture's word for three fields."""


def read_axes(path: Path) -> tuple[Axis, ...]:
    """The axes of a TOML file.

    Raises:
        SpecError: it cannot be read, or says no axes; one line.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: no space could be read ({error.strerror or error})") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError(f"{path}: no space could be read ({error})") from None
    unknown = [name for name in document if name != "axes"]
    if unknown or not document:
        what = f"unknown {unknown[0]!r}" if unknown else "it is empty"
        raise SpecError(f"{path}: {what}, expected one table [axes], e.g. micro_batch_size = [8, 16]")
    try:
        return axes_of(document["axes"])
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def axes_of(values: object) -> tuple[Axis, ...]:
    """Axes as data: by field its values, or by a name of one's own choices of several fields.

    Raises:
        SpecError: no such field, or no choices; one line.
    """
    if not isinstance(values, Mapping) or not values:
        raise SpecError("a space needs axes, by field: {'micro_batch_size': [8, 16], 'liger': [False, True]}")
    return tuple(_axis(str(name), choices) for name, choices in values.items())


def _axis(name: str, choices: object) -> Axis:
    if isinstance(choices, Mapping):
        if not choices:
            raise SpecError(f"axis {name!r} has no choice, expected one at least, e.g. off = {{ liger = false }}")
        if not all(isinstance(one, Mapping) and one for one in choices.values()):
            raise SpecError(f"axis {name!r}: each choice sets fields, e.g. off = {{ liger = false }}")
        return Axis(name, tuple(Choice(str(word), tuple(_fields(name, one))) for word, one in choices.items()))
    if not isinstance(choices, list | tuple) or not choices:
        raise SpecError(f"axis {name!r} is {choices!r}, expected a list of values, e.g. [8, 16]")
    for place, value in enumerate(choices):
        if any(type(value) is type(other) and value == other for other in choices[:place]):
            raise SpecError(f"axis {name!r} has {value!r} twice, expected each value once")
    if name == _PRECISION:
        return Axis(name, tuple(Choice(str(word), tuple(precision_fields(word).items())) for word in choices))
    _check(name, name)
    return Axis.over(name, choices)


def _fields(axis: str, values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        if name == _PRECISION:
            found += precision_fields(value).items()
            continue
        _check(axis, name)
        found.append((name, value))
    return found


def _check(axis: str, field: str) -> None:
    if field == _MODEL:
        raise SpecError(f"axis {axis!r} sets the model, expected fields that train the same one")
    if field in _HOW_TO_MEASURE:
        raise SpecError(f"axis {axis!r} sets {field}, expected what is trained: how it is measured is the search's")
    if field not in _KNOWN:
        raise SpecError(f"axis {axis!r}: TrainSpec has no field {field!r}{hint(field, _KNOWN)}")
