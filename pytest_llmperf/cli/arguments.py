"""What `llmperf` can be asked, for argparse."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pytest_llmperf import __version__
from pytest_llmperf.cli.check import command as check_command
from pytest_llmperf.cli.option_types import amount, count
from pytest_llmperf.cli.predict import forecast_pages
from pytest_llmperf.cli.report import purpose
from pytest_llmperf.insight import cost
from pytest_llmperf.insight.chapter15 import STEPS
from pytest_llmperf.report.exports import FORMATS


def arguments_parser() -> argparse.ArgumentParser:
    """Its namespace has ``command``, and ``usage`` where what was given may still be no use together."""
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--machine", metavar="KIND", help="only baselines of this machine kind")
    where.add_argument(
        "--perf-baselines", metavar="DIR", type=Path, default=Path("baselines"), help="default: %(default)s, here"
    )
    parser = argparse.ArgumentParser(prog="llmperf", description="Look into what pytest-llmperf keeps.")
    parser.add_argument("--version", action="version", version=f"pytest-llmperf {__version__}")
    rooms = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_baselines, _add_explain, _add_plan, _add_report, _add_predict):
        add(rooms, where)
    _add_check(rooms, where)
    _add_submit(rooms)
    _add_merge(rooms)
    return parser


def _add_baselines(rooms: Any, where: argparse.ArgumentParser) -> None:
    baselines = rooms.add_parser("baselines", help="stored figures: list, show, history, diff, merge")
    commands = baselines.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("list", parents=[where], help="every baseline on a line")
    one.set_defaults(command="list")
    case_help = "a spec's id, 6 digits or more of its digest, or a baseline's file"
    for name, text in (
        ("show", "one baseline: settings, launches, environment"),
        ("history", "every acceptance of one baseline, and why"),
    ):
        one = commands.add_parser(name, parents=[where], help=text, description=text)
        one.add_argument("case", metavar="CASE", help=case_help)
        one.set_defaults(command=name)
    one = commands.add_parser("diff", parents=[where], help="two baselines side by side, or all of two folders")
    one.add_argument("cases", metavar="CASE", nargs="*", help=f"A and B, each {case_help}")
    one.add_argument("--against", metavar="DIR", type=Path, help="A is this folder's: every case, or the one CASE")
    one.set_defaults(command="diff", usage=one.error)
    text = "what two branches accepted of one case, as one file: git's merge driver, or for a FILE that is in conflict"
    one = commands.add_parser("merge", help=text, description=text)
    sides = "a file in conflict, whose sides git has; or %%O %%A %%B, and %%P for its name, of a merge driver"
    one.add_argument("files", metavar="FILE", type=Path, nargs="+", help=sides)
    one.set_defaults(command="unite", usage=one.error)


def _add_explain(rooms: Any, where: argparse.ArgumentParser) -> None:
    text = "of what a traced step consists, and of what the difference between two does"
    explain = rooms.add_parser("explain", parents=[where], help=text, description=text)
    one = "a stored case (id, digest or file), or RESULTS.json[:ID] of --perf-json"
    explain.add_argument("case", metavar="CASE", help=one)
    explain.add_argument("other", metavar="OTHER", nargs="?", help="its step is held against that of CASE")
    explain.add_argument("--against", metavar="DIR", type=Path, help="hold CASE against the same case of this folder")
    explain.set_defaults(command="explain", usage=explain.error)


def _add_plan(rooms: Any, where: argparse.ArgumentParser) -> None:
    text = "the memory that specs will need, predicted without a GPU"
    plan = rooms.add_parser("plan", parents=[where], help=text, description=text)
    plan.add_argument("specs", metavar="SPEC", nargs="*", help="ids of stored cases, or one spec in key=value pairs")
    plan.add_argument("--stored", action="store_true", help="every stored case")
    how = plan.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="one JSON document a line")
    how.add_argument("--format", choices=FORMATS, help="a table, predicted beside measured; left out: a page for each")
    plan.set_defaults(command="plan", usage=plan.error)


def _add_report(rooms: Any, where: argparse.ArgumentParser) -> None:
    text = "what is stored, as the chapter's tables: beside the published figures, with the gain of each rung"
    report = rooms.add_parser("report", parents=[where], help=text, description=text)
    what = report.add_mutually_exclusive_group(required=True)
    what.add_argument("--tables", action="store_true", help="tables 15.1 to 15.9, and 15.10 to 15.12 of several GPUs")
    what.add_argument("--purpose", choices=tuple(cost.PURPOSES), help="which case and how many GPUs serve it best")
    report.add_argument("--format", choices=FORMATS, default="text", help="default: %(default)s")
    report.add_argument("--samples", metavar="N", type=count, help="also the epochs that a training over N covers")
    extent = report.add_mutually_exclusive_group()
    extent.add_argument("--steps", metavar="N", type=count, help=f"of that training, default: {STEPS}")
    extent.add_argument("--hours", metavar="H", type=amount, help="instead of --steps")
    purpose.add_options(report)
    report.set_defaults(command="report", usage=report.error)


def _add_predict(rooms: Any, where: argparse.ArgumentParser) -> None:
    text = "the throughput at numbers of GPUs that were not measured, from those that were, with its uncertainty"
    ahead = rooms.add_parser("predict", parents=[where], help=text, description=text)
    forecast_pages.add_options(ahead)
    ahead.set_defaults(command="predict")


def _add_check(rooms: Any, where: argparse.ArgumentParser) -> None:
    text = "launch specs until they are decided against their baselines, as pytest does, without pytest"
    check = rooms.add_parser("check", parents=[where], help=text, description=text)
    check_command.add_options(check)
    check.set_defaults(command="check", usage=check.error)


def _add_submit(rooms: Any) -> None:
    text = "the nightly job of a cluster file: its cost, then sbatch"
    send = rooms.add_parser("submit", help=text, description=text)
    send.add_argument("cluster", metavar="CLUSTER.ini", type=Path, nargs="?", help="what differs between sites")
    send.add_argument("--dry-run", action="store_true", help="only show what would be submitted and what it may cost")
    text = "a nightly script of your own, with the same placeholders; default: the one that comes with this package"
    send.add_argument("--script", metavar="FILE", type=Path, help=text)
    text = "print this cluster file, to start from; without a name: what there is"
    send.add_argument("--example", metavar="NAME", nargs="?", const="", help=text)
    send.set_defaults(command="submit", usage=send.error)


def _add_merge(rooms: Any) -> None:
    text = "the --perf-json files of one night as one, and a summary; exit code 1 unless all is green"
    join = rooms.add_parser("merge", help=text, description=text)
    join.add_argument("results", metavar="DIR|FILE", type=Path, nargs="+", help="gpus-*.json of a folder, or files")
    join.add_argument("--expect", metavar="NAME", action="append", default=[], help="a file that must be in the folder")
    text = "tests of so many GPUs are not missed; wider: of more than the night has"
    join.add_argument("--without", metavar="N|wider", action="append", default=[], help=text)
    join.add_argument("--json", metavar="FILE", type=Path)
    join.add_argument("--markdown", metavar="FILE", type=Path)
    text = "add a line to this file; inside of a SLURM job, make it the job's comment too"
    join.add_argument("--nights", metavar="FILE", type=Path, help=text)
    join.add_argument("--mail", metavar="ADDRESS", default="", help="send the summary there, by the program mail")
    join.add_argument(
        "--name", default="llmperf-nightly", help="of the night, for the mail's subject; default: %(default)s"
    )
    join.set_defaults(command="merge", usage=join.error)
