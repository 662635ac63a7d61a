"""The command: its options, and what it answers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from pytest_llmperf.cli.answer import Answer
from pytest_llmperf.cli.screen import Screen
from pytest_llmperf.cli.submit import night
from pytest_llmperf.cli.submit import night as templates


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of ``llmperf submit``."""
    add = parser.add_argument
    add("cluster", metavar="CLUSTER.ini", type=Path, nargs="?", help="what differs between sites")
    add("--dry-run", action="store_true", help="only show what would be submitted and what it may cost")
    text = "stay until it is merged; exit code 1 unless it is green"
    add("--wait", action="store_true", help=text)
    text = "a nightly script of your own, with the same placeholders; default: the one that comes with this package"
    add("--script", metavar="FILE", type=Path, help=text)
    text = "print this cluster file, to start from; without a name: what there is"
    add("--example", metavar="NAME", nargs="?", const="", help=text)
    parser.set_defaults(answer=_answer, usage=parser.error)


def _answer(arguments: argparse.Namespace, _screen: Screen) -> Answer:
    usage: Callable[[str], NoReturn] = arguments.usage
    if arguments.example is not None:
        if arguments.cluster or arguments.script or arguments.dry_run or arguments.wait:
            usage("--example submits nothing; expected it alone")
        lines = templates.example(arguments.example) if arguments.example else templates.listed()
        return Answer(lines, for_programs=True)
    if arguments.cluster is None:
        usage("expected CLUSTER.ini, or --example to start one")
    script = arguments.script or templates.folder() / "nightly.sbatch"
    if arguments.wait and arguments.dry_run:
        usage("--dry-run submits nothing to --wait for; expected one of them")
    return Answer(
        *night.submitted(arguments.cluster, script, dry_run=arguments.dry_run, wait=arguments.wait), acts=True
    )
