"""What a test's markers say of its case, read once."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_llmperf.judge.gain import Terms
from pytest_llmperf.judge.loss_curves import FEWEST_SEEDS
from pytest_llmperf.plugin.outcomes import failed
from pytest_llmperf.records.result import Reference
from pytest_llmperf.run.case import CaseTerms
from pytest_llmperf.run.learning_checks import SEEDS
from pytest_llmperf.run.settings import TOLERANCES
from pytest_llmperf.settings.evidence import declarable
from pytest_llmperf.support.quantities import A_TOLERANCE, is_positive, is_tolerance
from pytest_llmperf.support.suggestions import hint
from pytest_llmperf.support.units import GIB


def terms_of(item: pytest.Item) -> CaseTerms:
    """Read them; one that is misused ends the test with one line."""
    try:
        return CaseTerms(
            rung=str(_keyword(item, "rung", "number", "")),
            reference=_reference(item),
            tolerances=_tolerances(item),
            oom_below_gib=_oom_below_gib(item),
            inactive=_inactive(item),
            efficiency=_efficiency(item),
            parity=_parity(item),
            loss_curve=_loss_curve(item),
        )
    except _MisuseError as misuse:
        raise failed(f"{item.nodeid}: marker {misuse}") from None


class _MisuseError(Exception):
    """Marker, value and what was expected."""


def _keyword(item: pytest.Item, marker: str, name: str, default: Any) -> Any:
    mark = item.get_closest_marker(marker)
    if mark is None:
        return default
    _keywords_only(mark, (name,))  # as all markers are read, and as -m 'rung(number="15.9")' finds them
    if name not in mark.kwargs:
        raise _MisuseError(f"{marker} needs {name}=…")
    return mark.kwargs[name]


def _tolerances(item: pytest.Item) -> dict[str, float]:
    found: dict[str, float] = {}
    for mark in reversed(list(item.iter_markers("perf_tolerance"))):  # the closest one wins
        _keywords_only(mark, tuple(TOLERANCES))
        for word, value in mark.kwargs.items():
            found[TOLERANCES[word]] = _tolerance(mark.name, word, value)
    return found


def _reference(item: pytest.Item) -> Reference | None:
    mark = item.get_closest_marker("reference")
    if mark is None:
        return None
    _keywords_only(mark, ("source", "tokens_per_second_per_gpu", "peak_reserved_gib"))
    figures = {
        name: _positive(mark.name, name, value, "a positive number, or None where none was published")
        for name, value in mark.kwargs.items()
        if name != "source" and value is not None
    }
    gib = figures.get("peak_reserved_gib")
    return Reference(
        source=str(mark.kwargs.get("source", "")),
        tokens_per_second_per_gpu=figures.get("tokens_per_second_per_gpu"),
        peak_reserved_bytes=None if gib is None else gib * GIB,
    )


def _oom_below_gib(item: pytest.Item) -> float | None:
    value = _keyword(item, "expects_oom", "below_gib", None)
    return None if value is None else _positive("expects_oom", "below_gib", value, "a positive number of GiB")


def _inactive(item: pytest.Item) -> frozenset[str]:
    settings = declarable()
    names = [name for mark in item.iter_markers("expects_inactive") for name in mark.args]
    for name in names:
        if name not in settings:
            near = hint(str(name), settings) or ", e.g. 'liger'"
            raise _MisuseError(f"expects_inactive({name!r}): must be a setting that evidence tells of{near}")
    return frozenset(names)


def _parity(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("perf_parity")
    if mark is None:
        return False
    for value in (*mark.args, *mark.kwargs):
        raise _MisuseError(f"perf_parity({value!r}): takes nothing")
    return True


# More would be a night of its own.
_MOST_SEEDS = 64


def _loss_curve(item: pytest.Item) -> int:
    mark = item.get_closest_marker("perf_loss_curve")
    if mark is None:
        return 0
    _keywords_only(mark, ("seeds",))
    seeds = mark.kwargs.get("seeds", SEEDS)
    if isinstance(seeds, bool) or not isinstance(seeds, int) or not FEWEST_SEEDS <= seeds <= _MOST_SEEDS:
        raise _MisuseError(f"{mark.name}(seeds={seeds!r}): must be a number of seeds, {FEWEST_SEEDS} to {_MOST_SEEDS}")
    return seeds


# More than this is a slip of units: 85 for 85 %.
_MOST_EFFICIENT = 2


def _efficiency(item: pytest.Item) -> Terms:
    found: dict[str, float] = {}
    for mark in reversed(list(item.iter_markers("perf_scaling"))):  # the closest one wins
        _keywords_only(mark, ("efficiency_at_least", "tolerance"))
        for word, value in mark.kwargs.items():
            if word == "tolerance":
                found[word] = _tolerance(mark.name, word, value)
                continue
            expected = "a positive fraction of at most 2, e.g. 0.85"
            if _positive(mark.name, word, value, expected) > _MOST_EFFICIENT:
                raise _MisuseError(f"{mark.name}({word}={value!r}): must be {expected}")
            found[word] = value
    return Terms(at_least=found.get("efficiency_at_least"), tolerance=found.get("tolerance"))


def _keywords_only(mark: pytest.Mark, known: tuple[str, ...]) -> None:
    expected = ", ".join(f"{name}=…" for name in known)
    for value in mark.args:
        raise _MisuseError(f"{mark.name}({value!r}): must be given by name: {expected}")
    for name, value in mark.kwargs.items():
        if name not in known:
            raise _MisuseError(f"{mark.name}({name}={value!r}): unknown{hint(name, known)}; known: {expected}")


def _tolerance(marker: str, name: str, value: Any) -> float:
    if not is_tolerance(value):
        raise _MisuseError(f"{marker}({name}={value!r}): must be {A_TOLERANCE}")
    return value


def _positive(marker: str, name: str, value: Any, expected: str) -> float:
    if not is_positive(value):
        raise _MisuseError(f"{marker}({name}={value!r}): must be {expected}")
    return value
