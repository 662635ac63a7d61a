"""What `llmperf` can be asked, with the options that several commands have, and what a command answers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from pytest_llmperf.report.text import FORMATS, Column, Glyphs, one_line, render
from pytest_llmperf.run.options import STORED, Settings, add_to_command, instead, meant
from pytest_llmperf.run.options import table as options_of
from pytest_llmperf.support import MADE_BY, formats, user_input
from pytest_llmperf.support.user_input import argument

#: Of a spec. Fewer digits are as likely a word.
DIGEST = re.compile(r"[0-9a-f]{6,16}")


@dataclass(frozen=True)
class Answer:
    lines: Iterable[str]
    troubles: Sequence[str] = ()
    """For standard error, a line each; one is enough for exit code 1. Lines that take their time may add to it."""
    for_programs: bool = False
    """Whether its lines are a format that no terminal's width may break."""
    acts: bool = False
    """Whether its lines tell of what is done meanwhile: that goes on to its end, read or not."""


class CommandError(Exception):
    """Who, what, what was expected and what to do, a line each; the command ends with exit code 1."""


class CaseError(CommandError):
    """No baselines, or no such case: one line with who, what was expected, the nearest known name and what to do."""


class NotStoredError(CaseError):
    """Nothing of that name is stored, or nothing at all: what its settings name can do without."""


class ClusterError(CommandError):
    """A cluster file that cannot serve: one line with the file, what is wrong and what was expected."""


@dataclass(frozen=True)
class Screen:
    """Where lines go: how wide it is (``None`` for a file or a pipe), and what it can show."""

    width: int | None
    glyphs: Glyphs


def table(columns: Sequence[Column], screen: Screen) -> list[str]:
    return render(columns, screen.width, color=False, glyphs=screen.glyphs)


def facts(values: Mapping[str, object]) -> list[str]:
    width = max(map(len, values), default=0)
    return [f"  {plain(name):{width}}  {plain(value) or formats.ABSENT}" for name, value in values.items()]


def plain(value: object) -> str:
    """What a file says, as one line: whatever its type, it moves no cursor."""
    return one_line(str(value))


#: Each is answered by its module in ``commands``, but for those that share one.
_HOMES = {
    "export": "commands.history:add_export_options",
    "merge": "night_log:add_merge_options",
    "scale": "commands.plan:add_scale_options",
    "nights": "night_log:add_nights_options",
}
_COMMANDS = {
    "baselines": "stored figures: list, show",
    "history": "what a case took, run by run, and where that changed; without one all, worst first",
    "plan": "the memory that specs will need, predicted without a GPU",
    "scale": "what a step takes of each of many ranks, without a GPU: collectives, their bytes, memory, arithmetic",
    "expect": "the rate that a training should reach on a GPU, by what is stored, and where a measured one stands",
    "report": "what is stored, as the chapter's tables: beside the published figures, with the gain of each rung; "
    "and runs, as a page",
    "check": "launch specs until they are decided against their baselines, as pytest does, without pytest",
    "tune": "the fastest configuration of a model that fits here: searched, compared in turns, shown to be sound",
    "script": "what could be held of a training command of your own, by two short launches; or watch a real run",
    "bisect": "the revision, or the version, with which a training became slower, larger or another",
    "submit": "the nightly job of a cluster file: its cost, then sbatch",
    "merge": "the --perf-json files of one night as one, and a summary; exit code 1 unless all is green",
    "nights": "the nights of a folder and where each stands; exit code 1 where a new one is missing",
    "export": "--perf-json files as one page of Markdown",
}


# Options of several commands, and of no run's settings.
_OF_COMMANDS: Mapping[str, Mapping[str, Any]] = {
    "--json": {"action": "store_true", "help": "one JSON document instead of a page"},
    "--format": {"choices": FORMATS},
    "--minutes": {
        "type": argument(user_input.positive, "a time in minutes above 0"),
        "metavar": "M",
        "help": "for all of it (default: %(default)g)",
    },
    "--mail": {
        "type": argument(user_input.mail, "an address, or several with commas; none begins with -"),
        "metavar": "ADDRESS",
        "default": "",
    },
}


class CommandParser(argparse.ArgumentParser):
    """That of one command; ``options`` names the function that adds its own: who calls one loads no other."""

    def __init__(self, *, options: str = "", **words: Any) -> None:
        super().__init__(**words)
        self._options = options
        self.set_defaults(parser=self, usage=self.error)

    def read_options(self) -> None:
        if self._options:
            add_options, self._options = resolve_name(self._options), ""
            add_options(self)

    def parse_known_args(self, *args: Any, **others: Any) -> Any:
        self.read_options()
        return super().parse_known_args(*args, **others)

    def meant(self, unknown: Sequence[str]) -> str:
        return meant(unknown, self._option_string_actions, self.prog.partition(" ")[2])

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # As argparse does it, which on older Pythons suggests nothing.
        if action.choices is not None and value not in action.choices:
            names = list(map(str, action.choices))
            known = f"(choose from {', '.join(map(repr, names))})"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r} {known}{instead(str(value), names)}")


def arguments_parser() -> CommandParser:
    """Its namespace has ``answer``, what gives it, and often ``usage``: what was given may still be no use together."""
    parser = CommandParser(prog="llmperf", description="Look into what pytest-llmperf keeps.")
    parser.add_argument("--version", action="version", version=MADE_BY)
    rooms = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, what in _COMMANDS.items():
        description = what if name != "baselines" else None  # its own commands have one each
        home = _HOMES.get(name, f"commands.{name}:add_options")
        rooms.add_parser(name, help=what, description=description, options=f"pytest_llmperf.cli.{home}")
    return parser


def add_shared(parser: argparse.ArgumentParser, front: str) -> None:
    """Add the options of a run's settings that ``front`` has."""
    add_to_command(parser, (one for _, one in options_of(Settings)), front)


def add_option(parser: Any, flag: str, **words: Any) -> None:
    """Add one that other commands have too, to a parser or a group of it; ``words``: what is different here."""
    parser.add_argument(flag, **{**_OF_COMMANDS[flag], **words})


def add_place(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, STORED)
