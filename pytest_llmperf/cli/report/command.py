"""The command: its options, and what it answers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytest_llmperf.cli.answer import Answer, CaseError
from pytest_llmperf.cli.arguments import add_place, add_shared
from pytest_llmperf.cli.baseline_folder import Shelf
from pytest_llmperf.cli.report import ladder_tables, tables
from pytest_llmperf.cli.screen import Screen
from pytest_llmperf.engine.run_page.run_document import RunDocument
from pytest_llmperf.engine.run_page.run_page import write_page
from pytest_llmperf.records.results_document import ResultsError, read_values
from pytest_llmperf.report.page.html_page import missing
from pytest_llmperf.run.reading import usual_history
from pytest_llmperf.support.version import MADE_BY

# ``llmperf report RESULTS… --html FILE``: runs that are over, as the page that ``--perf-report`` writes.


def written(path: Path, results: Sequence[Path], baselines: Path, history: Path | None = None) -> Answer:
    """What was written to ``path``, and a line for each of ``results`` that is not in it."""
    if why := missing():
        return Answer([], [f"--html {path}: {why}"])
    found, troubles = list[tuple[str, Any]](), list[str]()
    for file in results:
        try:
            found.append((file.name, read_values(file)))
        except ResultsError as error:
            troubles.append(str(error))
    if not found:
        return Answer([], [*troubles, f"{path}: no page was written, there is nothing to show"])
    names = _told_apart([name for name, _ in found]) if len(found) > 1 else [""]
    runs = [RunDocument(document, name) for (_, document), name in zip(found, names, strict=True)]
    page = write_page(path, runs, baselines, troubles, made_by=MADE_BY, history=history)
    if page.why_none:
        return Answer([], [*troubles, page.why_none])
    troubles += page.without
    cases = sum(len(run.results) for run in runs)
    return Answer([f"{path}: {cases} case{'s' * (cases != 1)} of {_runs(len(runs))}"], troubles)


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


def _told_apart(names: Sequence[str]) -> list[str]:
    """``names``, numbered where one comes twice."""
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of ``llmperf report``."""
    add_place(parser)
    parser.add_argument("results", metavar="RESULTS", type=Path, nargs="*", help="--perf-json files, for --html")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tables", action="store_true", help="tables 15.1 to 15.9, and 15.10 to 15.12 of several GPUs")
    what.add_argument("--html", metavar="FILE", type=Path, help="the runs of RESULTS as one page that needs no network")
    add_shared(parser, "report")
    parser.set_defaults(answer=_answer, usage=parser.error)


def _answer(arguments: argparse.Namespace, screen: Screen) -> Answer:
    _refuse_misplaced(arguments)
    if arguments.html:
        return written(arguments.html, arguments.results, arguments.perf_baselines, _history(arguments))
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
    scaled = tables.scalings(shelf)
    if arguments.format == "markdown":
        return Answer(ladder_tables.markdown_page(machine, found, scaled), troubles, for_programs=True)
    return Answer(ladder_tables.text_page(machine, found, screen, scaled), troubles)
