"""Specs on the command line: ids of stored cases, or one spec in ``key=value`` pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pytest_llmperf.cli.answer import CaseError, NotStoredError
from pytest_llmperf.cli.baseline_folder import Shelf, Stored, find
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.static_steps import StepStore
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.suggestions import hint

_PAIRS = "model=llama-3.2-1b micro_batch_size=8"


@dataclass(frozen=True)
class Named:
    """A spec that somebody named, and what is stored of it where it was named by that."""

    spec: TrainSpec
    stored: Stored[Baseline] | None = None


def named(words: Sequence[str], baselines: Path, machine: str | None) -> list[Named]:
    """What ``words`` name, in their order; the pairs are one spec, and the last.

    BaselineError: the file of a case cannot serve; CaseError: no such case, or a spec that cannot be.
    """
    cases = [_found(word, baselines, machine) for word in words if "=" not in word]
    pairs = settings([word for word in words if "=" in word])
    if not pairs:
        return cases
    try:
        return [*cases, Named(TrainSpec.from_dict(pairs))]
    except ValueError as error:
        raise CaseError(str(error)) from error


def settings(words: Sequence[str]) -> dict[str, Any]:
    """What ``key=value`` pairs set of one spec; CaseError: no pair, one given twice, or a value of another type."""
    for word in words:
        if "=" not in word:
            raise CaseError(f"{word}: expected settings in pairs, e.g. {_PAIRS}")
    pairs = [_pair(word) for word in words]
    twice = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]
    if twice:
        raise CaseError(f"{twice[0]}= is given twice, expected once: pairs name one spec")
    return dict(pairs)


def unusual_settings(spec: TrainSpec) -> dict[str, Any]:
    """What names ``spec``: its model, and what is not as it is anyway."""
    usual = {one.name: one.default for one in fields(TrainSpec)}
    return {name: value for name, value in spec.to_dict().items() if name == "model" or value != usual.get(name)}


def _found(word: str, baselines: Path, machine: str | None) -> Named:
    try:
        return _of(find(word, baselines, machine))
    except NotStoredError as error:
        # Of a case that nobody has launched the figures without a launch name its settings as well.
        unlaunched = None if machine else StepStore(baselines).settings(word)
        if unlaunched is not None:
            return Named(TrainSpec.from_dict(unlaunched))
        raise CaseError(f"{error}; what is not stored is named by its settings, e.g. {_PAIRS}") from None


def all_stored(shelf: Shelf) -> tuple[list[Named], list[str]]:
    """Every case of ``shelf``, and a line for each file that cannot serve."""
    cases, troubles = [], shelf.troubles
    for stored in shelf.stored:
        try:
            cases.append(_of(stored))
        except CaseError as error:
            troubles.append(str(error))
    return cases, troubles


def _of(stored: Stored[Baseline]) -> Named:
    try:
        return Named(TrainSpec.from_dict(stored.baseline.spec), stored)
    except (TypeError, ValueError) as error:
        raise CaseError(f"{stored.path}: its stored settings are none of today's ({error})") from error


def _pair(word: str) -> tuple[str, Any]:
    name, _, text = word.partition("=")
    kinds = {f.name: str(f.type) for f in fields(TrainSpec)}
    kind = kinds.get(name, "str")  # an unknown name is TrainSpec's to refuse
    try:
        if kind == "bool":
            return name, {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind == "int":
            return name, int(text)
        if kind.startswith("float"):
            return name, float(text)
    except (KeyError, ValueError):
        near = hint(text, ["true", "false"]) if kind == "bool" else ""
        expected = {"bool": "true or false", "int": "a whole number"}.get(kind, "a number")
        raise CaseError(f"{word}: expected {expected}{near}") from None
    return name, text
