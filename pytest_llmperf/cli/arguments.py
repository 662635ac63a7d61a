"""What `llmperf` can be asked, for argparse: its commands, and the options that several of them have."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from pytest_llmperf import __version__
from pytest_llmperf.cli.command_parser import CommandParser


class _Command(NamedTuple):
    """Its module in ``commands`` has its name."""

    help: str
    description: bool = True


_COMMANDS = {
    "baselines": _Command("stored figures: list, show, history, diff", description=False),
    "explain": _Command("of what a traced step consists, and of what the difference between two does"),
    "history": _Command("what a case took, run by run, and where that changed; without one all, worst first"),
    "plan": _Command("the memory that specs will need, predicted without a GPU"),
    "report": _Command(
        "what is stored, as the chapter's tables: beside the published figures, with the gain of each rung; "
        "and runs, as a page"
    ),
    "check": _Command("launch specs until they are decided against their baselines, as pytest does, without pytest"),
    "tune": _Command(
        "the fastest configuration of a model that fits here: searched, compared in turns, shown to be sound"
    ),
    "bisect": _Command(
        "the revision, or the version of a package, with which a training became slower, larger or another"
    ),
    "submit": _Command("the nightly job of a cluster file: its cost, then sbatch"),
    "merge": _Command("the --perf-json files of one night as one, and a summary; exit code 1 unless all is green"),
    "nights": _Command("the nights of a folder and where each stands; exit code 1 where a new one is missing"),
    "export": _Command("--perf-json files as one text for another tool: Markdown, GitLab, Prometheus, JUnit"),
}


def arguments_parser() -> argparse.ArgumentParser:
    """Its namespace has ``answer``, what gives it, and often ``usage``: what was given may still be no use together."""
    parser = CommandParser(prog="llmperf", description="Look into what pytest-llmperf keeps.")
    parser.add_argument("--version", action="version", version=f"pytest-llmperf {__version__}")
    rooms = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        module = f"pytest_llmperf.cli.commands.{name}"
        rooms.add_parser(
            name, help=command.help, description=command.help if command.description else None, module=module
        )
    return parser


def add_place(parser: argparse.ArgumentParser) -> None:
    """Where baselines are looked for."""
    parser.add_argument("--machine", metavar="KIND", help="only baselines of this machine kind")
    parser.add_argument(
        "--perf-baselines", metavar="DIR", type=Path, default=Path("baselines"), help="default: %(default)s, here"
    )
