"""The command: its options, and what it answers."""

from __future__ import annotations

import argparse
import json

from pytest_llmperf.cli.answer import Answer
from pytest_llmperf.cli.arguments import add_place
from pytest_llmperf.cli.option_types import points, width, widths
from pytest_llmperf.cli.predict import forecast_pages
from pytest_llmperf.cli.predict.forecast import GPUS_PER_NODE, outlook
from pytest_llmperf.cli.screen import Screen
from pytest_llmperf.insight import communication_model
from pytest_llmperf.report.exports import FORMATS


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of ``llmperf predict``."""
    add_place(parser)
    add = parser.add_argument
    add("case", metavar="CASE", nargs="*", help="a stored case of the series, or one spec in key=value pairs")
    add("--gpus", metavar="N,…", type=widths, required=True, help="numbers of GPUs to predict, e.g. 16,32,256")
    add("--points", metavar="N:RATE,…", type=points, help="GPUs and tokens/s per GPU, in place of baselines")
    add("--fit-up-to", metavar="N", type=width, help="hold wider points back, and show the error at them")
    add("--gpus-per-node", metavar="N", type=width, help=f"default: as stored of several hosts, else {GPUS_PER_NODE}")
    add(
        "--algorithm",
        choices=communication_model.ALGORITHMS,
        default="auto",
        help="of the all-reduce; auto: the faster",
    )
    add("--network-from", metavar="CASE", help="another training here whose widths say what the network is")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="with the fit")
    how.add_argument("--format", choices=FORMATS, default="text", help="default: %(default)s")
    parser.set_defaults(answer=_answer)


def _answer(arguments: argparse.Namespace, screen: Screen) -> Answer:
    found = outlook(arguments)
    if arguments.json:
        return Answer([json.dumps(forecast_pages.document(found))], for_programs=True)
    match arguments.format:
        case "csv":
            return Answer(forecast_pages.csv_page(found), for_programs=True)
        case "markdown":
            return Answer(forecast_pages.markdown_page(found), for_programs=True)
    return Answer(forecast_pages.text_page(found, screen))
