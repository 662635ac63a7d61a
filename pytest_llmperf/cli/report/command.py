"""The command: its options, and what it answers."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_llmperf.cli.answer import Answer
from pytest_llmperf.cli.arguments import add_place
from pytest_llmperf.cli.baseline_folder import Shelf
from pytest_llmperf.cli.command_error import CaseError
from pytest_llmperf.cli.report import ladder_tables, run_pages, scaling_tables
from pytest_llmperf.cli.screen import Screen
from pytest_llmperf.report.exports import FORMATS
from pytest_llmperf.run.usual_history import usual_history


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of ``llmperf report``."""
    add_place(parser)
    parser.add_argument("results", metavar="RESULTS", type=Path, nargs="*", help="--perf-json files, for --html")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tables", action="store_true", help="tables 15.1 to 15.9, and 15.10 to 15.12 of several GPUs")
    what.add_argument("--html", metavar="FILE", type=Path, help="the runs of RESULTS as one page that needs no network")
    help_history = "the store of runs before these, for --html, or off; default: the one to which runs add"
    parser.add_argument("--perf-history", metavar="FILE|off", help=help_history)
    parser.add_argument("--format", choices=FORMATS, default="text", help="default: %(default)s")
    parser.set_defaults(answer=_answer, usage=parser.error)


def _answer(arguments: argparse.Namespace, screen: Screen) -> Answer:
    _refuse_misplaced(arguments)
    if arguments.html:
        return run_pages.written(arguments.html, arguments.results, arguments.perf_baselines, _history(arguments))
    return _tables(arguments, screen)


def _history(arguments: argparse.Namespace) -> Path | None:
    said: str | None = arguments.perf_history
    if said is None:
        return usual_history()
    return None if said == "off" else Path(said)


def _refuse_misplaced(arguments: argparse.Namespace) -> None:
    if arguments.html and not arguments.results:
        arguments.usage("--html needs RESULTS: the --perf-json files of the runs")
    if arguments.results and not arguments.html:
        arguments.usage(f"{arguments.results[0]} says nothing to --tables: RESULTS go with --html FILE")
    if arguments.html and arguments.machine:
        arguments.usage("--machine says nothing to --html")


def _tables(arguments: argparse.Namespace, screen: Screen) -> Answer:
    shelf = Shelf.read(arguments.perf_baselines, arguments.machine)
    troubles = shelf.troubles
    try:
        machine, found = ladder_tables.ladders(shelf)
    except CaseError as error:
        return Answer([], [*troubles, str(error)])
    scaled = scaling_tables.scalings(shelf)
    if arguments.format == "markdown":
        return Answer(ladder_tables.markdown_page(machine, found, scaled), troubles, for_programs=True)
    return Answer(ladder_tables.text_page(machine, found, screen, scaled), troubles)
