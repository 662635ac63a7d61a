"""The command: its options, and what it answers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from pytest_llmperf.cli.answer import Answer
from pytest_llmperf.cli.arguments import add_place
from pytest_llmperf.cli.baseline_folder import Shelf
from pytest_llmperf.cli.command_error import CaseError
from pytest_llmperf.cli.option_types import amount, count, instants
from pytest_llmperf.cli.report import ladder_tables, loss_tables, purpose, purpose_pages, run_pages, scaling_tables
from pytest_llmperf.cli.screen import Screen
from pytest_llmperf.insight import cost
from pytest_llmperf.insight.chapter15 import STEPS
from pytest_llmperf.insight.ladder import Extent
from pytest_llmperf.report.exports import FORMATS
from pytest_llmperf.run.usual_history import usual_history


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of ``llmperf report``."""
    add_place(parser)
    parser.add_argument("results", metavar="RESULTS", type=Path, nargs="*", help="--perf-json files, for --html")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tables", action="store_true", help="tables 15.1 to 15.9, and 15.10 to 15.12 of several GPUs")
    what.add_argument("--purpose", choices=tuple(cost.PURPOSES), help="which case and how many GPUs serve it best")
    help_losses = "of --perf-json files: what each training had learnt by when"
    what.add_argument("--losses", metavar="FILE", type=Path, nargs="+", help=help_losses)
    help_at = "seconds after which --losses tells them, e.g. 10,20,35"
    what.add_argument("--html", metavar="FILE", type=Path, help="the runs of RESULTS as one page that needs no network")
    help_history = "the store of runs before these, for --html, or off; default: the one to which runs add"
    parser.add_argument("--perf-history", metavar="FILE|off", help=help_history)
    parser.add_argument("--at", metavar="SECONDS,…", type=instants, help=help_at)
    parser.add_argument("--format", choices=FORMATS, default="text", help="default: %(default)s")
    parser.add_argument("--samples", metavar="N", type=count, help="also the epochs that a training over N covers")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--steps", metavar="N", type=count, help=f"of that training, default: {STEPS}")
    extent.add_argument("--hours", metavar="H", type=amount, help="instead of --steps")
    purpose.add_options(parser)
    parser.set_defaults(answer=_answer, usage=parser.error)


def _answer(arguments: argparse.Namespace, screen: Screen) -> Answer:
    _refuse_misplaced(arguments)
    if arguments.html:
        return run_pages.written(arguments.html, arguments.results, arguments.perf_baselines, _history(arguments))
    if arguments.losses:
        return _losses(arguments, screen)
    if arguments.purpose is not None:
        return _purpose(arguments, screen)
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
        arguments.usage(f"{arguments.results[0]} says nothing to {_asked(arguments)}: RESULTS go with --html FILE")
    misplaced = purpose.misplaced(arguments)
    if misplaced:
        arguments.usage(f"{misplaced} says nothing to {_asked(arguments)}")


def _tables(arguments: argparse.Namespace, screen: Screen) -> Answer:
    extent = _extent(arguments)
    shelf = Shelf.read(arguments.perf_baselines, arguments.machine)
    troubles = shelf.troubles
    try:
        machine, found = ladder_tables.ladders(shelf)
    except CaseError as error:
        return Answer([], [*troubles, str(error)])
    scaled = scaling_tables.scalings(shelf)
    match arguments.format:
        case "csv":
            return Answer(ladder_tables.csv_page(machine, found, extent, scaled), troubles, for_programs=True)
        case "markdown":
            return Answer(ladder_tables.markdown_page(machine, found, extent, scaled), troubles, for_programs=True)
    return Answer(ladder_tables.text_page(machine, found, extent, screen, scaled), troubles)


def _asked(arguments: argparse.Namespace) -> str:
    if arguments.html:
        return "--html"
    if arguments.losses:
        return "--losses"
    return "--purpose" if arguments.purpose else "--tables"


def _losses(arguments: argparse.Namespace, screen: Screen) -> Answer:
    found, troubles = loss_tables.trainings(arguments.losses)
    times = loss_tables.times_of(found, arguments.at or ())
    if not found:
        return Answer([], troubles)
    match arguments.format:
        case "csv":
            return Answer(loss_tables.csv_page(found, times), troubles, for_programs=True)
        case "markdown":
            return Answer(loss_tables.markdown_page(found, times), troubles, for_programs=True)
    return Answer(loss_tables.text_page(found, times, screen), troubles)


def _purpose(arguments: argparse.Namespace, screen: Screen) -> Answer:
    found, troubles = purpose.asked(arguments)
    match arguments.format:
        case "csv":
            return Answer(purpose_pages.csv_page(found), troubles, for_programs=True)
        case "markdown":
            return Answer(purpose_pages.markdown_page(found), troubles, for_programs=True)
    return Answer(purpose_pages.text_page(found, screen), troubles)


def _extent(arguments: argparse.Namespace) -> Extent | None:
    samples, steps, hours = arguments.samples, arguments.steps, arguments.hours
    if samples is not None:
        return Extent(samples, STEPS if steps is None else steps, hours)
    usage: Callable[[str], NoReturn] = arguments.usage
    return None if steps is None and hours is None else usage("--steps and --hours need --samples: epochs of what?")
