"""The codec of all records, on records of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from pytest_llmperf.support import codec
from pytest_llmperf.support.codec import Amount, Count, Number


@dataclass(frozen=True)
class Inner:
    number: int
    times: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.number == 13:
            raise ValueError("13 is unlucky")


@codec.sparse("word")
@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner
    word: Literal["a", "b"] = "a"
    figure: Number | None = None
    count: Count = 0
    amount: Amount = 0.0
    names: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    several: tuple[Inner, ...] = ()
    by_name: Mapping[str, Inner] = field(default_factory=dict)
    anything: Mapping[str, Any] = field(default_factory=dict)


WHOLE = Outer(
    inner=Inner(1, (0.5, math.inf)),
    figure=7,
    names={"a": {"b": 1.0}},
    several=(Inner(2),),
    by_name={"x": Inner(3)},
    anything={"deep": [{"y": None}]},
)


def test_a_record_comes_back_and_keeps_the_form_of_its_figures() -> None:
    values = json.loads(json.dumps(codec.plain(WHOLE)))
    found = codec.read(Outer, values)
    assert found == WHOLE
    assert isinstance(found.figure, int)


def test_what_is_at_its_default_is_absent_but_for_what_files_always_had() -> None:
    assert codec.plain(Outer(inner=Inner(1))) == {"inner": {"number": 1, "times": []}, "word": "a"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inner": {}}, "inner has no 'number'"),
        ({"inner": {"number": 1.5}}, "inner.number is 1.5, expected a whole number"),
        ({"inner": {"number": True}}, "inner.number is true, expected a whole number"),
        ({"inner": {"number": 2**63}}, "number is 9223372036854775808, which is no figure"),
        ({"inner": {"number": 1, "times": [1, "2"]}}, 'inner.times[1] is "2", expected a number'),
        ({"inner": {"number": 1, "time": []}}, "inner has 'time', which is unknown (did you mean 'times'?)"),
        ({"inner": {"number": 13}}, "13 is unlucky"),
        ({"word": "c"}, 'word is "c", which is unknown'),
        ({"count": -1}, "count is -1, expected a whole number >= 0"),
        ({"amount": math.inf}, "amount is Infinity, expected a number < "),
        ({"amount": math.nan}, "amount is NaN, expected a number >= 0"),
        ({"names": {"a": {"b": 1, "c": "d"}}}, "names 'a' 'c' is \"d\", expected a number"),
        ({"several": [{"number": 1}, {"number": "x"}]}, 'several[1].number is "x", expected a whole number'),
        ({"by_name": {"x": {"number": 1}, "y": {}}}, "has no 'number'"),
        ({"several": {}}, "several is {}, expected a list"),
        ({"new": 1}, "an outer has 'new', which is unknown"),
    ],
)
def test_what_does_not_fit_is_one_line_with_the_field_what_it_is_and_what_was_expected(
    change: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its words are looked at below
        codec.read(Outer, {**codec.plain(WHOLE), **change})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fields_of_a_newer_version_pass_where_that_is_asked_for() -> None:
    values = {**codec.plain(WHOLE), "new": 1, "inner": {**codec.plain(WHOLE.inner), "newer": 2}}
    assert codec.read(Outer, values, newer=True) == WHOLE


def test_the_lenient_reading_keeps_what_fits() -> None:
    values = {
        "inner": {"number": 1, "times": [1, "2", None]},
        "word": "c",
        "figure": "x",
        "names": {"a": {"b": 1, "c": "d"}, "e": 3},
        "several": [{"number": 2}, {"times": []}, 7],
        "new": 1,
    }
    found = codec.read_lenient(Outer, values)
    assert found == Outer(inner=Inner(1, (1.0,)), names={"a": {"b": 1.0}}, several=(Inner(2),))
    assert codec.read_lenient(Outer, {"inner": {}}) is None
    assert codec.read_lenient(Outer, None) is None


def test_a_kept_file_that_cannot_be_used_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    assert codec.load(Outer, path) is None
    assert codec.keep(path, WHOLE) == ""
    assert codec.load(Outer, path) == WHOLE
    for broken in ("", "{", "[]", "[" * 100_000, '{"inner": 3}'):
        path.write_text(broken)
        assert codec.load(Outer, path) is None
    path.unlink()
    path.mkdir()
    assert "directory" in codec.keep(path, WHOLE)
