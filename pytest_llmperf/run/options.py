"""Option: what a run, or a command, can be asked for. A front-end's arguments and the reference are made of these.

The options of a run are the fields of ``run/settings.py``. Every start of pytest loads this: it imports little.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from pytest_llmperf.support.user_input import argument, hint

#: The front-ends that make runs; the other commands of ``llmperf`` read what runs have left.
PYTEST, CHECK, TUNE, BISECT, SCRIPT = "pytest", "check", "tune", "bisect", "script"
#: Every command that reads stored baselines.
STORED = "stored"

#: ``--update-baselines`` of pytest.
UPDATES = {
    "--update-baselines": ("all", "record every selected case that ran clean"),
    "--update-baselines=all": ("all", "the same"),
    "--update-baselines=new": ("new", "record only cases that have no baseline"),
    "--update-baselines=prune": ("prune", "launch nothing; remove baselines that no case of the suite has"),
}


class UsageError(Exception):
    """What was asked for cannot be had here: an option, the hardware, the allocation."""


class OptionError(Exception):
    """A value that cannot be used: one line."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One entry of the table."""

    flag: str = ""
    """On the command line; empty: only the ini file says it."""
    help: str = ""
    fronts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Front-ends that have it, and what is different there: ``flag``, ``default``, ``help``."""
    default: Any = None
    parse: Callable[[str], Any] | None = None
    """From text; ``None``: the text is no such value."""
    expected: str = ""
    """What ``parse`` takes, for people."""
    keeps_text: bool = False
    """Whether it stays as typed, checked, until settings are read: commands that a message offers repeat it."""
    choices: tuple[str, ...] = ()
    means: Mapping[str, Any] = field(default_factory=dict)
    """The values of choices that are not the words."""
    metavar: str = ""
    is_switch: bool = False
    path: Literal["", "file", "folder", "store", "source"] = ""
    """What it names: a file to write, a folder, a file to add to (or ``off``), a file to read."""
    ini: str = ""
    ini_help: str = ""
    static: Literal["", "refused", "idle"] = ""
    """Under ``--perf-static``, which launches nothing: refused, or without effect."""
    repeated: bool = False
    """Whether the command that a message offers repeats it: it decides how a case is judged."""

    @property
    def dest(self) -> str:
        """Its name in the namespace of argparse, and in pytest's."""
        if self.flag == "--update-baselines":
            return "perf_update"
        return self.flag.removeprefix("--").replace("-", "_")

    def at(self, front: str, name: str) -> Any:
        return self.fronts.get(front, {}).get(name, getattr(self, name))

    def typed(self, text: str) -> Any:
        """From ``text``, of an ini file, say; ``OptionError``: it is no such value."""
        if self.choices and text not in self.choices:
            raise OptionError(f"expected {', '.join(self.choices)}{hint(text, self.choices)}")
        value = text if self.parse is None else self.parse(text)
        if value is None:
            raise OptionError(f"expected {self.expected}")
        return self.means.get(text, value)

    def words(self, front: str) -> dict[str, Any]:
        """For argparse's ``add_argument``. No default: ``None`` says that nobody said anything."""
        default, text = self.at(front, "default"), self.at(front, "help")
        if default and "(" not in text:
            shown = f"{default:g}" if isinstance(default, float) and front != PYTEST else default
            text += f" (default: {shown})"
        words: dict[str, Any] = {"help": text.replace("%", "%%")}
        if self.is_switch:
            return words | {"action": "store_const", "const": True}
        if self.choices:
            words["choices"] = self.choices
        if self.metavar:
            words["metavar"] = self.metavar
        if self.parse is not None:
            words["type"] = argument(self._checked if self.keeps_text else self.parse, self.expected)
        return words

    def _checked(self, text: str) -> str | None:
        return text if self.parse is not None and self.parse(text) else None


def option(
    flag: str = "", fronts: Mapping[str, Any] | None = None, what: str = "", *, default: Any = None, **words: Any
) -> Any:
    """A field of settings, with its entry of the table; ``default=MISSING``: whoever makes settings says it."""
    unsaid = None if default is MISSING else default
    entry = Option(flag=flag, fronts=fronts or {}, help=what, default=unsaid, **words)
    return field(default=default, metadata={"option": entry})


def switch(flag: str, fronts: Mapping[str, Any], what: str, **words: Any) -> Any:
    """A field that is off unless its flag is given, or its ini value is true."""
    return option(flag, fronts, what, default=False, is_switch=True, **words)


def table(settings: Any) -> Iterator[tuple[str, Option]]:
    """The options of ``settings``, by field."""
    return ((each.name, each.metadata["option"]) for each in fields(settings) if "option" in each.metadata)


def is_said(options: Iterable[Option], said: Any) -> bool:
    return any(one.flag and getattr(said, one.dest, None) is not None for one in options)


def only(*fronts: str, **changed: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The front-ends that have an option, and what is different there."""
    return {**{front: {} for front in fronts}, **changed}


def add_to_pytest(parser: Any, options: Iterable[Option]) -> None:
    """Register flags and ini values with pytest's ``parser``."""
    group = parser.getgroup("llmperf", "LLM training performance (pytest-llmperf)")
    for one in options:
        if one.dest == "perf_update":  # spelled out: with an optional value it would take the path that follows it
            for flag, (value, what) in UPDATES.items():
                group.addoption(flag, dest=one.dest, action="store_const", const=value, help=what)
        elif PYTEST in one.fronts:
            group.addoption(one.flag, **one.words(PYTEST))
        if one.ini:
            kind = {"type": "bool", "default": False} if one.is_switch else {"default": ""}
            parser.addini(one.ini, one.ini_help or f"as {one.flag}", **kind)


def add_to_command(
    parser: Any, options: Iterable[Option], front: str, flags: Sequence[str] = (), *, has_defaults: bool = False
) -> None:
    """Register the flags of ``front``, or ``flags`` of them, with argparse; at once with defaults where no settings
    are read of these."""
    for one in options:
        if front not in one.fronts or (flags and one.flag not in flags):
            continue
        words, flag = one.words(front), one.at(front, "flag")
        if one.dest == "perf_update":
            words |= {"help": "record what ran clean; new: only what has no baseline", "choices": ("all", "new")}
            words |= {"nargs": "?", "const": "all"}
        elif one.path == "folder":  # who reads it without settings has a path
            words |= {"type": _folder, "default": Path(one.at(front, "default") or "baselines")}
        if has_defaults:
            words.setdefault("default", one.at(front, "default"))
        parser.add_argument(flag, dest=one.dest, **words)


def _folder(text: str) -> Path:
    if why := why_no_folder(text):
        raise ArgumentTypeError(why)
    return Path(text)


def why_no_folder(text: str | Path) -> str:
    """Why this can be no folder of baselines; empty where it can, or is not there yet."""
    if text == "":  # a shell's variable that is not set
        return "'': expected a path"
    is_file = Path(text).exists() and not Path(text).is_dir()
    return f"{text}: it is a file; name the folder that holds the baselines" if is_file else ""


def refuse_unknown_update(words: Iterable[object]) -> None:
    """Say what ``--update-baselines=`` takes in pytest; argparse would only say that it ignores the value."""
    flag, known = "--update-baselines=", ("new", "all", "prune")
    for word in map(str, words):
        value = word.removeprefix(flag)
        if word.startswith(flag) and value not in known:
            raise OptionError(f"{flag}{value}: expected {', '.join(known)}{hint(value, known)}")
