"""The settings of a TrainSpec, and what is made of all of them: ids, checks, needs. A new one is listed here."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_llmperf.settings import (
    attention,
    batch,
    compilation,
    data,
    duration,
    liger,
    optimizer,
    parallelism,
    precision,
    recomputation,
    weights,
)
from pytest_llmperf.settings.setting import Package, Setting, TrainSpec
from pytest_llmperf.support.suggestions import hint

#: In the order in which a search decides.
SETTINGS: tuple[Setting, ...] = (
    precision.SETTING,
    attention.SETTING,
    liger.SETTING,
    compilation.SETTING,
    optimizer.SETTING,
    recomputation.SETTING,
    parallelism.SETTING,
    batch.SETTING,
    data.SETTING,
    weights.SETTING,
    duration.SETTING,
)

# In the order of ids, which is older.
_ORDER = "precision attention liger compilation recomputation optimizer batch parallelism data weights duration".split()
_IN_ID = sorted(SETTINGS, key=lambda setting: _ORDER.index(setting.name))


def words_in_id(spec: TrainSpec) -> Iterator[str]:
    """What an id says of every setting that is on."""
    for setting in _IN_ID:
        for name, words in setting.in_id.items():
            if callable(words):
                yield words(spec)
            elif getattr(spec, name) != getattr(type(spec), name):
                yield words.format(getattr(spec, name))


def value_problem(spec: TrainSpec) -> str | None:
    """Why a value cannot be, in one line; fields are of their types.

    Raises:
        SpecError: there is no such text or tokenizer.
    """
    return next((line for setting in SETTINGS for line in _problems(setting, spec)), None)


def _problems(setting: Setting, spec: TrainSpec) -> Iterator[str]:
    yield from setting.problems(spec)
    for name, known in setting.values.items():
        value = getattr(spec, name)
        if value not in known:
            yield f"TrainSpec: unknown {name} {value!r}{hint(value, known)}; known: {_some(known)}"


def _some(known: tuple[str, ...]) -> str:
    return ", ".join(known[:8]) + (f", … ({len(known)} in all)" if len(known) > 8 else "")  # noqa: PLR2004


def clash(spec: TrainSpec) -> str | None:
    """Why these settings cannot train together and what to do instead, in one line; ``None`` where they can."""
    return next((line for setting in SETTINGS if (line := setting.clash(spec))), None)


def why_not_on_cpu(spec: TrainSpec) -> str | None:
    """Why it trains on a GPU only."""
    return next((why for setting in SETTINGS if (why := setting.why_not_on_cpu(spec))), None)


def packages(spec: TrainSpec) -> Iterator[Package]:
    """What it needs installed beside what every training does."""
    return (package for setting in SETTINGS if (package := setting.needs(spec)) is not None)
