"""What a test's markers say of its case, read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pytest_llmperf.judge.run_effects import Terms
from pytest_llmperf.plugin.reports import failed
from pytest_llmperf.records.result import Reference
from pytest_llmperf.run.case import CaseTerms
from pytest_llmperf.run.options import TOLERANCES
from pytest_llmperf.settings.registry import declarable
from pytest_llmperf.support.formats import GIB
from pytest_llmperf.support.user_input import A_TOLERANCE, hint, is_positive, is_tolerance

# More seeds would be a night of its own; more efficient is a slip of units: 85 for 85 %.
_MOST_SEEDS, _MOST_EFFICIENT = 64, 2


def _is_positive_or_none(value: Any) -> bool:
    return value is None or is_positive(value)


_Keyword = tuple[Callable[[Any], bool], str]
_ANYTHING: _Keyword = (lambda _: True, "")
_TOLERANCE: _Keyword = (is_tolerance, A_TOLERANCE)
_EFFICIENCY: _Keyword = (
    lambda value: is_positive(value) and value <= _MOST_EFFICIENT,
    "a positive fraction of at most 2, e.g. 0.85",
)
_PUBLISHED: _Keyword = (_is_positive_or_none, "a positive number, or None where none was published")
# The keywords of each marker, with what each takes, and that in words.
_KEYWORDS: Mapping[str, Mapping[str, _Keyword]] = {
    "rung": {"number": _ANYTHING},
    "reference": {"source": _ANYTHING, "tokens_per_second_per_gpu": _PUBLISHED, "peak_reserved_gib": _PUBLISHED},
    "perf_tolerance": dict.fromkeys(TOLERANCES, _TOLERANCE),
    "perf_scaling": {"efficiency_at_least": _EFFICIENCY, "tolerance": _TOLERANCE},
    "expects_oom": {"below_gib": (_is_positive_or_none, "a positive number of GiB")},
}


class _MisuseError(Exception):
    """Marker, value and what was expected."""


def terms_of(item: pytest.Item) -> CaseTerms:
    """Read them; one that is misused ends the test with one line."""
    try:
        rung = _said(item, "rung", needs="number") or {}
        tolerances = _said(item, "perf_tolerance", every=True) or {}
        oom = _said(item, "expects_oom", needs="below_gib") or {}
        scaling = _said(item, "perf_scaling", every=True) or {}
        published = _said(item, "reference")
        parity = item.get_closest_marker("perf_parity")
        for value in (*parity.args, *parity.kwargs) if parity else ():
            raise _MisuseError(f"perf_parity({value!r}): takes nothing")
        return CaseTerms(
            rung=str(rung.get("number", "")),
            reference=None if published is None else _reference(published),
            tolerances={TOLERANCES[word]: value for word, value in tolerances.items()},
            oom_below_gib=oom.get("below_gib"),
            inactive=_inactive(item),
            efficiency=Terms(at_least=scaling.get("efficiency_at_least"), tolerance=scaling.get("tolerance")),
            parity=parity is not None,
        )
    except _MisuseError as misuse:
        raise failed(f"{item.nodeid}: marker {misuse}") from None


def _said(item: pytest.Item, marker: str, *, every: bool = False, needs: str = "") -> dict[str, Any] | None:
    """The keywords of the closest mark, or of ``every``, of which the closest wins; ``None`` where there is none."""
    known, found = _KEYWORDS[marker], dict[str, Any]()
    expected = ", ".join(f"{name}=…" for name in known)
    marks = [*item.iter_markers(marker)][: None if every else 1]
    for mark in reversed(marks):
        for value in mark.args:  # by name, as -m 'rung(number="15.9")' finds them
            raise _MisuseError(f"{marker}({value!r}): must be given by name: {expected}")
        for name, value in mark.kwargs.items():
            if name not in known:
                raise _MisuseError(f"{marker}({name}={value!r}): unknown{hint(name, known)}; known: {expected}")
            is_right, what = known[name]
            if not is_right(value):
                raise _MisuseError(f"{marker}({name}={value!r}): must be {what}")
        if needs and needs not in mark.kwargs:
            raise _MisuseError(f"{marker} needs {needs}=…")
        found |= mark.kwargs
    return found if marks else None


def _reference(said: Mapping[str, Any]) -> Reference:
    rate, gib = said.get("tokens_per_second_per_gpu"), said.get("peak_reserved_gib")
    peak = None if gib is None else gib * GIB
    return Reference(source=str(said.get("source", "")), tokens_per_second_per_gpu=rate, peak_reserved_bytes=peak)


def _inactive(item: pytest.Item) -> frozenset[str]:
    settings = declarable()
    names = [name for mark in item.iter_markers("expects_inactive") for name in mark.args]
    for name in names:
        if name not in settings:
            near = hint(str(name), settings) or ", e.g. 'liger'"
            raise _MisuseError(f"expects_inactive({name!r}): must be a setting that evidence tells of{near}")
    return frozenset(names)
