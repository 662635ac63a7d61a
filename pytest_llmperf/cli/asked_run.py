"""What a command is asked to launch: specs in words, the run that it makes of them, and what is seen of launches."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from pytest_llmperf.cli.answer import CaseError, NotStoredError, plain
from pytest_llmperf.cli.baseline_folder import Shelf, Stored, chosen_settings, find
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.static_steps import StepStore
from pytest_llmperf.report.text import LaunchLines, Numbered
from pytest_llmperf.run.findings import CaseFailedError, Findings, RunEndedError, UsageError
from pytest_llmperf.run.reading import read_settings
from pytest_llmperf.run.run import Run
from pytest_llmperf.settings.spec import ScriptSpec, Spec, read_spec, within
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.user_input import hint


def asked_run(arguments: argparse.Namespace, **fixed: Any) -> Run:
    """On hardware that is there; ``fixed`` are settings that the command's own options say."""
    with usage_errors(arguments):
        here = Path.cwd()
        run = Run(read_settings(arguments.front, arguments, here=here, rootdir=here, **fixed), rootdir=here)
        _ = run.machine_kind
    return run


@contextmanager
def searching(run: Run, troubles: list[str]) -> Iterator[Findings]:
    """For a search, whose launches are no results of a run. What ends it, and each bad launch, is in ``troubles``."""
    try:
        yield Findings()
    except (CaseFailedError, RunEndedError, UsageError) as error:
        troubles.append(str(error).splitlines()[0])
    finally:
        troubles += run.bad_ends
        run.finish(0, Terminal())


@contextmanager
def usage_errors(arguments: argparse.Namespace) -> Iterator[None]:
    """Ends the command as argparse does, where what was asked for cannot be had, before anything is launched."""
    try:
        yield
    except UsageError as error:
        usage: Callable[[str], NoReturn] = arguments.usage
        usage(str(error))


class Terminal:
    """Standard error, since what is printed as the answer stays by itself: a live line, in a log two plain lines."""

    shows_launches = True

    def say(self, line: str) -> None:
        if sys.stderr is not None:
            print(plain(f"llmperf: {line}"), file=sys.stderr, flush=True)

    @contextmanager
    def launch(self, spec_id: str, number: int, launches: int) -> Iterator[LaunchLines]:
        shown = self.shows_launches
        write = self._write if shown and sys.stderr is not None and sys.stderr.isatty() else None
        say = self.say if shown else lambda _line: None
        lines = LaunchLines(Numbered(spec_id, number, launches), say=say, write=write)
        try:
            yield lines
        finally:
            lines.clear()

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    def ended_from_outside(self, _error: BaseException) -> str:
        """Nobody but Ctrl-C ends a command."""
        return ""


_PAIRS = "model=llama-3.2-1b micro_batch_size=8"


@dataclass(frozen=True)
class Named:
    """A spec that somebody named, and what is stored of it where it was named by that."""

    spec: Spec
    stored: Stored[Baseline] | None = None


def named(words: Sequence[str], baselines: Path, machine: str | None, script: str | None = None) -> list[Named]:
    """What ``words`` name; pairs are one spec, the last, with the command ``script``. BaselineError, CaseError."""
    cases = [_found(word, baselines, machine) for word in words if "=" not in word]
    pairs = settings([*([] if script is None else [f"command={script}"]), *(word for word in words if "=" in word)])
    if not cases and not pairs:
        raise CaseError(f"no case is named; expected an id, pairs, e.g. {_PAIRS}, or --script 'python train.py'")
    if not pairs:
        return cases
    try:
        return [*cases, Named(within(read_spec(pairs), Path.cwd()))]
    except ValueError as error:
        raise CaseError(str(error)) from error


def settings(words: Sequence[str]) -> dict[str, Any]:
    """What ``key=value`` pairs set of one spec; CaseError: no pair, one given twice, or a value of another type."""
    for word in words:
        if "=" not in word:
            raise CaseError(f"{word}: expected settings in pairs, e.g. {_PAIRS}")
    kind = ScriptSpec if any(word.startswith("command=") for word in words) else TrainSpec
    pairs = [_pair(word, {f.name: str(f.type) for f in fields(kind)}) for word in words]
    if twice := [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]:
        raise CaseError(f"{twice[0]}= is given twice, expected once: pairs name one spec")
    return dict(pairs)


def as_pairs(spec: Spec) -> list[str]:
    return [f"{name}={_written(value)}" for name, value in chosen_settings(spec.to_dict()).items()]


def _written(value: object) -> str:
    if isinstance(value, Mapping):
        pairs = ",".join(f"{name}={each}" for name, each in value.items())
        return pairs if pairs[:1] != "{" and _mapping(pairs) == value else json.dumps(value)
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _found(word: str, baselines: Path, machine: str | None) -> Named:
    try:
        return _of(find(word, baselines, machine))
    except NotStoredError as error:
        # Of a case that nobody has launched the figures without a launch name its settings as well.
        unlaunched = None if machine else StepStore(baselines).settings(word)
        if unlaunched is not None:
            return Named(read_spec(unlaunched))
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
        return Named(read_spec(stored.baseline.spec), stored)
    except (TypeError, ValueError) as error:
        raise CaseError(f"{stored.path}: its stored settings are none of today's ({error})") from error


def _mapping(text: str) -> dict[str, str]:
    """By ``NAME=VALUE``, several with commas; a comma that no name follows is of the value. Or JSON."""
    if text.startswith("{"):
        return dict(json.loads(text))
    return dict(part.split("=", 1) for part in re.split(r",(?=[A-Za-z_]\w*=)", text))


def _open_mapping(text: str) -> str | dict[str, Any]:
    """The same, of values of any type: what is no JSON is a text."""
    found: dict[str, Any] = {}
    for name, value in () if text.startswith("{") else _mapping(text).items():
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found or text


_READ: Mapping[str, Callable[[str], Any]] = {
    "bool": lambda text: {"true": True, "1": True, "false": False, "0": False}[text.lower()],
    "int": int,
    "float": float,
    "str | int": lambda text: int(text) if text.isdecimal() else text,
    "str | Mapping[str, Any]": _open_mapping,
    "Sequence": lambda text: text.split(","),
    "Mapping": _mapping,
}
_EXPECTED = {"bool": "true or false", "int": "a whole number", "Mapping": "NAME=VALUE, several with commas"}


def _pair(word: str, kinds: Mapping[str, str]) -> tuple[str, Any]:
    name, _, text = word.partition("=")
    kind = kinds.get(name, "str")  # an unknown name is the spec's to refuse
    first = "Mapping" if "Mapping" in kind else re.split(r"\W", kind, maxsplit=1)[0]
    try:
        return name, _READ.get(kind, _READ.get(first, str))(text)
    except (KeyError, ValueError):
        near = hint(text, ["true", "false"]) if kind == "bool" else ""
        raise CaseError(f"{word}: expected {_EXPECTED.get(first, 'a number')}{near}") from None
