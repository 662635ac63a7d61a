"""The command: its options, and what it answers."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_llmperf.cli.answer import Answer
from pytest_llmperf.cli.arguments import add_shared
from pytest_llmperf.cli.left_out_widths import left_out
from pytest_llmperf.cli.merge import night_results
from pytest_llmperf.cli.merge.notice import Notice
from pytest_llmperf.cli.screen import Screen
from pytest_llmperf.cli.submit import night


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of ``llmperf merge``."""
    add = parser.add_argument
    add("results", metavar="DIR|FILE", type=Path, nargs="+", help="gpus-*.json of a folder, or files")
    add("--expect", metavar="NAME", action="append", default=[], help="a file that must be in the folder")
    text = "tests of so many GPUs are not missed; wider: of more than the night has"
    add("--without", metavar="N|wider", action="append", default=[], help=text)
    add("--json", metavar="FILE", type=Path)
    add("--markdown", metavar="FILE", type=Path)
    text = "add a line to this file; inside of a SLURM job, make it the job's comment too"
    add("--nights", metavar="FILE", type=Path, help=text)
    add_shared(parser, "merge")
    add("--name", default="llmperf-nightly", help="of the night, for the mail's subject; default: %(default)s")
    parser.set_defaults(answer=_answer, usage=parser.error)


def _answer(arguments: argparse.Namespace, _screen: Screen) -> Answer:
    without = left_out(arguments.without)
    if without is None:
        arguments.usage(f"--without {' '.join(arguments.without)}: expected numbers of GPUs, or the word wider")
    found = night_results.gather(arguments.results, arguments.expect, without)
    told = Notice(arguments.results[0].name, name=arguments.name, mail=arguments.mail, nights=arguments.nights)
    return Answer(*night.merged(found, arguments.json, arguments.markdown, told), acts=True)
