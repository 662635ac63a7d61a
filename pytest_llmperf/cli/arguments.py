"""What `llmperf` can be asked, for argparse: its commands, and the options that several of them have."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from pytest_llmperf.report.table import FORMATS
from pytest_llmperf.run.options import BISECT, STORED, TUNE, Option, add_to_command, only, table
from pytest_llmperf.run.settings import Settings
from pytest_llmperf.support import MADE_BY, user_input

#: Each is answered by its module in ``commands``.
_COMMANDS = {
    "baselines": "stored figures: list, show, history, diff",
    "explain": "of what a traced step consists, and of what the difference between two does",
    "history": "what a case took, run by run, and where that changed; without one all, worst first",
    "plan": "the memory that specs will need, predicted without a GPU",
    "report": "what is stored, as the chapter's tables: beside the published figures, with the gain of each rung; "
    "and runs, as a page",
    "check": "launch specs until they are decided against their baselines, as pytest does, without pytest",
    "tune": "the fastest configuration of a model that fits here: searched, compared in turns, shown to be sound",
    "script": "what could be held of a training command of your own, by two short launches; or watch a real run",
    "bisect": "the revision, or the version of a package, with which a training became slower, larger or another",
    "submit": "the nightly job of a cluster file: its cost, then sbatch",
    "merge": "the --perf-json files of one night as one, and a summary; exit code 1 unless all is green",
    "nights": "the nights of a folder and where each stands; exit code 1 where a new one is missing",
    "export": "--perf-json files as one text for another tool: Markdown, GitLab, Prometheus, JUnit",
}


# Of several commands, and of no run's settings.
_OF_COMMANDS = (
    Option(
        flag="--json",
        is_switch=True,
        help="one JSON document instead of a page",
        fronts=only(TUNE, BISECT, "history", plan={"help": "one JSON document a line"}),
    ),
    Option(
        flag="--format",
        choices=FORMATS,
        fronts=only(
            plan={"help": "a table, predicted beside measured; left out: a page for each"},
            report={"default": "text", "help": "of the answer"},
        ),
    ),
    Option(
        flag="--minutes",
        parse=user_input.positive,
        expected="a time in minutes above 0",
        metavar="M",
        help="for all of it",
        fronts=only(tune={"default": 10.0}, bisect={"default": 60.0}),
    ),
    Option(
        flag="--mail",
        default="",
        parse=user_input.mail,
        expected="an address, or several with commas; none begins with -",
        metavar="ADDRESS",
        fronts=only(
            merge={"help": "send the summary there, by the program mail"},
            nights={"help": "with --newer-than: mail it there, by the program mail"},
        ),
    ),
)


class CommandParser(argparse.ArgumentParser):
    """That of one command; its ``module`` has ``add_options(parser)``.

    Whoever calls one command pays for the imports of no other.
    """

    def __init__(self, *, module: str = "", **words: Any) -> None:
        super().__init__(**words)
        self._module = module

    def parse_known_args(self, *args: Any, **others: Any) -> Any:
        """As argparse does, with the options of the module."""
        if self._module:
            module, self._module = import_module(self._module), ""
            module.add_options(self)
        return super().parse_known_args(*args, **others)


def arguments_parser() -> argparse.ArgumentParser:
    """Its namespace has ``answer``, what gives it, and often ``usage``: what was given may still be no use together."""
    parser = CommandParser(prog="llmperf", description="Look into what pytest-llmperf keeps.")
    parser.add_argument("--version", action="version", version=MADE_BY)
    rooms = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, what in _COMMANDS.items():
        description = what if name != "baselines" else None  # its own commands have one each
        rooms.add_parser(name, help=what, description=description, module=f"pytest_llmperf.cli.commands.{name}")
    return parser


def add_shared(parser: Any, front: str, *flags: str) -> None:
    """Add the options that ``front`` has together with others, or ``flags`` of them, to a parser or a group of it."""
    add_to_command(parser, (one for _, one in table(Settings)), front, flags)
    add_to_command(parser, _OF_COMMANDS, front, flags, has_defaults=True)


def add_place(parser: argparse.ArgumentParser) -> None:
    """Where baselines are looked for."""
    add_shared(parser, STORED)
