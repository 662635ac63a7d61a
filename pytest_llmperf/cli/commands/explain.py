"""The command: its options, and what it answers."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_llmperf.cli.answer import Answer
from pytest_llmperf.cli.arguments import add_place
from pytest_llmperf.cli.screen import Screen
from pytest_llmperf.cli.step_pages import difference_page, step_page
from pytest_llmperf.cli.traced import traced


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of ``llmperf explain``."""
    add_place(parser)
    one = "a stored case (id, digest or file), or RESULTS.json[:ID] of --perf-json"
    parser.add_argument("case", metavar="CASE", help=one)
    parser.add_argument("other", metavar="OTHER", nargs="?", help="its step is held against that of CASE")
    parser.add_argument("--against", metavar="DIR", type=Path, help="hold CASE against the same case of this folder")
    parser.set_defaults(answer=_answer, usage=parser.error)


def _answer(arguments: argparse.Namespace, screen: Screen) -> Answer:
    root, machine, usage = arguments.perf_baselines, arguments.machine, arguments.usage
    if arguments.other and arguments.against:
        usage("expected OTHER or --against DIR, not both")
    one = traced(arguments.case, root, machine)
    if arguments.other:
        return Answer(difference_page(one, traced(arguments.other, root, machine), screen))
    if arguments.against:
        return Answer(difference_page(traced(arguments.case, arguments.against, machine), one, screen))
    return Answer(step_page(one, screen))
