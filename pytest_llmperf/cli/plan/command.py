"""The command: its options, and what it answers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from pytest_llmperf.cli.answer import Answer
from pytest_llmperf.cli.arguments import add_place
from pytest_llmperf.cli.baseline_folder import Shelf
from pytest_llmperf.cli.command_error import CaseError
from pytest_llmperf.cli.plan.memory_pages import Prediction, columns, document, page, predictions
from pytest_llmperf.cli.screen import Screen, table
from pytest_llmperf.cli.spec_arguments import Named, all_stored, named
from pytest_llmperf.report.exports import FORMATS, markdown


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of ``llmperf plan``."""
    add_place(parser)
    parser.add_argument("specs", metavar="SPEC", nargs="*", help="ids of stored cases, or one spec in key=value pairs")
    parser.add_argument("--stored", action="store_true", help="every stored case")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="one JSON document a line")
    how.add_argument("--format", choices=FORMATS, help="a table, predicted beside measured; left out: a page for each")
    parser.set_defaults(answer=_answer, usage=parser.error)


def _answer(arguments: argparse.Namespace, screen: Screen) -> Answer:
    root, machine = arguments.perf_baselines, arguments.machine
    usage: Callable[[str], NoReturn] = arguments.usage
    if arguments.stored == bool(arguments.specs):
        usage("expected specs, or --stored and none")
    cases, troubles = named(arguments.specs, root, machine), list[str]()
    if arguments.stored:
        cases, troubles = all_stored(Shelf.read(root, machine))
    found = _predicted(cases, troubles)
    if arguments.json:
        return Answer((json.dumps(document(one)) for one in found), troubles, for_programs=True)
    if arguments.format is None:
        return Answer((line for one in found for line in page(one)), troubles)
    rows = list(found)
    if arguments.format == "markdown":
        return Answer(markdown(columns(rows)), troubles, for_programs=True)
    return Answer(table(columns(rows), screen), troubles)


def _predicted(cases: Sequence[Named], troubles: list[str]) -> Iterator[Prediction]:
    for one in predictions(cases):
        if isinstance(one, CaseError):
            troubles.append(str(one))
        else:
            yield one
