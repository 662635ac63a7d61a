"""The command line: arguments in, lines printed, an exit code out. All that prints is here."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pytest_llmperf.cli import ladder, merge, night, predict, purpose, widths
from pytest_llmperf.cli.clusterfile import ClusterError
from pytest_llmperf.cli.diff import against_page, diff_page, pairs_of
from pytest_llmperf.cli.pages import Screen, history_page, list_page, show_page, table
from pytest_llmperf.cli.plan import Prediction, columns, document, page, predictions, record
from pytest_llmperf.cli.quantities import amount, count
from pytest_llmperf.cli.shelf import CaseError, Shelf, find
from pytest_llmperf.cli.specs import Named, all_stored, named
from pytest_llmperf.insight import cost
from pytest_llmperf.insight.chapter15 import STEPS
from pytest_llmperf.insight.ladder import Extent
from pytest_llmperf.judge.document import BaselineError
from pytest_llmperf.report.tables import FORMATS, comma_separated, markdown
from pytest_llmperf.report.text import fold, glyphs_of, one_line

_INTERRUPTED = 130  # 128 and SIGINT, as shells say it


@dataclass(frozen=True)
class _Answer:
    lines: Iterable[str]
    troubles: Sequence[str] = ()
    """For standard error, a line each; one is enough for exit code 1. Lines that take their time may add to it."""
    for_programs: bool = False
    """Whether its lines are a format that no terminal's width may break."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 is fine, 1 is no baselines, no such case or a broken file, and argparse exits with 2."""
    try:
        try:
            return _run(argv)
        finally:
            print(end="", flush=True)
    except BrokenPipeError:  # whoever reads has seen enough
        _discard_output()
        return 0
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as error:  # a full disk, a folder that may not be read
        _discard_output()
        print(f"llmperf: {one_line(str(error))}", file=sys.stderr)
        return 1


def _discard_output() -> None:
    # Python flushes standard output once more at its end, and would complain of it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _run(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    screen = _screen()
    answer_to: Callable[[argparse.Namespace, Screen], _Answer] = arguments.answer
    try:
        answer = answer_to(arguments, screen)
    except (BaselineError, CaseError, ClusterError) as error:
        answer = _Answer([], str(error).splitlines())
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # there is no standard output after >&-
    width = None if answer.for_programs else screen.width
    for line in answer.lines:
        for part in fold(line, width, indent="    ") or [""]:
            # At once: a prediction takes seconds, and whoever reads may have seen enough.
            print(part.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    for line in answer.troubles:
        print(f"llmperf: {one_line(line)}", file=sys.stderr)
    return 1 if answer.troubles else 0


def _screen() -> Screen:
    # A pipe or a file gets lines as long as they are: one case, one line.
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else None
    return Screen(width, glyphs_of(getattr(sys.stdout, "encoding", None)))


def _list(arguments: argparse.Namespace, screen: Screen) -> _Answer:
    shelf = Shelf.read(arguments.perf_baselines, arguments.machine)
    return _Answer(list_page(shelf.stored, screen), list(shelf.broken.values()))


def _show(arguments: argparse.Namespace, screen: Screen) -> _Answer:
    return _Answer(show_page(find(arguments.case, arguments.perf_baselines, arguments.machine), screen))


def _history(arguments: argparse.Namespace, screen: Screen) -> _Answer:
    return _Answer(history_page(find(arguments.case, arguments.perf_baselines, arguments.machine), screen))


def _diff(arguments: argparse.Namespace, screen: Screen) -> _Answer:
    root, machine = arguments.perf_baselines, arguments.machine
    match arguments.cases, arguments.against:
        case [a, b], None:
            return _Answer(diff_page(find(a, root, machine), find(b, root, machine), screen))
        case [one], Path() as other:
            return _Answer(diff_page(find(one, other, machine), find(one, root, machine), screen))
        case [], Path() as other:
            return _against(Shelf.read(other, machine), Shelf.read(root, machine), screen)
    usage: Callable[[str], NoReturn] = arguments.usage
    return usage("expected two cases, or --against DIR and at most one case")


def _plan(arguments: argparse.Namespace, screen: Screen) -> _Answer:
    root, machine = arguments.perf_baselines, arguments.machine
    usage: Callable[[str], NoReturn] = arguments.usage
    if arguments.stored == bool(arguments.specs):
        usage("expected specs, or --stored and none")
    cases, troubles = named(arguments.specs, root, machine), list[str]()
    if arguments.stored:
        cases, troubles = all_stored(Shelf.read(root, machine))
    found = _predicted(cases, troubles)
    if arguments.json:
        return _Answer((json.dumps(document(one)) for one in found), troubles, for_programs=True)
    if arguments.format is None:
        return _Answer((line for one in found for line in page(one)), troubles)
    rows = list(found)
    match arguments.format:
        case "csv":
            return _Answer(comma_separated([record(one) for one in rows]), troubles, for_programs=True)
        case "markdown":
            return _Answer(markdown(columns(rows)), troubles, for_programs=True)
    return _Answer(table(columns(rows), screen), troubles)


def _predicted(cases: Sequence[Named], troubles: list[str]) -> Iterator[Prediction]:
    for one in predictions(cases):
        if isinstance(one, CaseError):
            troubles.append(str(one))
        else:
            yield one


def _report(arguments: argparse.Namespace, screen: Screen) -> _Answer:
    misplaced = purpose.misplaced(arguments)
    if misplaced:
        arguments.usage(f"{misplaced} says nothing to {'--purpose' if arguments.purpose else '--tables'}")
    if arguments.purpose is not None:
        return _purpose(arguments, screen)
    extent = _extent(arguments)
    shelf = Shelf.read(arguments.perf_baselines, arguments.machine)
    troubles = list(shelf.broken.values())
    try:
        machine, found = ladder.ladders(shelf)
    except CaseError as error:
        return _Answer([], [*troubles, str(error)])
    scaled = widths.scalings(shelf)
    match arguments.format:
        case "csv":
            return _Answer(ladder.csv_page(machine, found, extent, scaled), troubles, for_programs=True)
        case "markdown":
            return _Answer(ladder.markdown_page(machine, found, extent, scaled), troubles, for_programs=True)
    return _Answer(ladder.text_page(machine, found, extent, screen, scaled), troubles)


def _purpose(arguments: argparse.Namespace, screen: Screen) -> _Answer:
    found, troubles = purpose.asked(arguments)
    match arguments.format:
        case "csv":
            return _Answer(purpose.csv_page(found), troubles, for_programs=True)
        case "markdown":
            return _Answer(purpose.markdown_page(found), troubles, for_programs=True)
    return _Answer(purpose.text_page(found, screen), troubles)


def _predict(arguments: argparse.Namespace, screen: Screen) -> _Answer:
    found = predict.outlook(arguments)
    if arguments.json:
        return _Answer([json.dumps(predict.document(found))], for_programs=True)
    match arguments.format:
        case "csv":
            return _Answer(predict.csv_page(found), for_programs=True)
        case "markdown":
            return _Answer(predict.markdown_page(found), for_programs=True)
    return _Answer(predict.text_page(found, screen))


def _extent(arguments: argparse.Namespace) -> Extent | None:
    samples, steps, hours = arguments.samples, arguments.steps, arguments.hours
    if samples is not None:
        return Extent(samples, STEPS if steps is None else steps, hours)
    usage: Callable[[str], NoReturn] = arguments.usage
    return None if steps is None and hours is None else usage("--steps and --hours need --samples: epochs of what?")


def _submit(arguments: argparse.Namespace, _screen: Screen) -> _Answer:
    return _Answer(*night.submitted(arguments.cluster, arguments.script, dry_run=arguments.dry_run))


def _merge(arguments: argparse.Namespace, _screen: Screen) -> _Answer:
    found = merge.gather(arguments.results, arguments.expect)
    lines = night.merged(found, arguments.json, arguments.markdown)
    return _Answer(lines, found.troubles)


def _against(a: Shelf, b: Shelf, screen: Screen) -> _Answer:
    troubles = [*a.broken.values(), *b.broken.values()]
    if not pairs_of(a, b):
        line = f"{a.root}: no case in common with {b.root}, expected the same digests and machines; name two cases"
        return _Answer([], [*troubles, line])
    return _Answer(against_page(a, b, screen), troubles)


def _add_insight(rooms: Any, where: argparse.ArgumentParser) -> None:
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
    report.set_defaults(answer=_report, usage=report.error)

    text = "the throughput at numbers of GPUs that were not measured, from those that were, with its uncertainty"
    ahead = rooms.add_parser("predict", parents=[where], help=text, description=text)
    predict.add_options(ahead)
    ahead.set_defaults(answer=_predict)


def _parser() -> argparse.ArgumentParser:
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument("--machine", metavar="KIND", help="only baselines of this machine kind")
    where.add_argument(
        "--perf-baselines", metavar="DIR", type=Path, default=Path("baselines"), help="default: %(default)s, here"
    )
    parser = argparse.ArgumentParser(prog="llmperf", description="Look into what pytest-llmperf keeps.")
    rooms = parser.add_subparsers(required=True, metavar="COMMAND")
    baselines = rooms.add_parser("baselines", help="stored figures: list, show, history, diff")
    commands = baselines.add_subparsers(required=True, metavar="COMMAND")

    one = commands.add_parser("list", parents=[where], help="every baseline on a line")
    one.set_defaults(answer=_list)
    case_help = "a spec's id, 6 digits or more of its digest, or a baseline's file"
    for name, answer, text in (
        ("show", _show, "one baseline: settings, launches, environment"),
        ("history", _history, "every acceptance of one baseline, and why"),
    ):
        one = commands.add_parser(name, parents=[where], help=text, description=text)
        one.add_argument("case", metavar="CASE", help=case_help)
        one.set_defaults(answer=answer)

    text = "the memory that specs will need, predicted without a GPU"
    plan = rooms.add_parser("plan", parents=[where], help=text, description=text)
    plan.add_argument("specs", metavar="SPEC", nargs="*", help="ids of stored cases, or one spec in key=value pairs")
    plan.add_argument("--stored", action="store_true", help="every stored case")
    how = plan.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="one JSON document a line")
    how.add_argument("--format", choices=FORMATS, help="a table, predicted beside measured; left out: a page for each")
    plan.set_defaults(answer=_plan, usage=plan.error)

    _add_insight(rooms, where)

    text = "the nightly job of a cluster file: its cost, then sbatch"
    send = rooms.add_parser("submit", help=text, description=text)
    send.add_argument("cluster", metavar="CLUSTER.ini", type=Path, help="examples: slurm/clusters/")
    send.add_argument("--dry-run", action="store_true", help="only show what would be submitted and what it may cost")
    send.add_argument("--script", metavar="FILE", type=Path, default=Path("slurm/nightly.sbatch"))
    send.set_defaults(answer=_submit)

    text = "the --perf-json files of one night as one, and a summary; exit code 1 unless all is green"
    join = rooms.add_parser("merge", help=text, description=text)
    join.add_argument("results", metavar="DIR|FILE", type=Path, nargs="+", help="gpus-*.json of a folder, or files")
    join.add_argument("--expect", metavar="NAME", action="append", default=[], help="a file that must be in the folder")
    join.add_argument("--json", metavar="FILE", type=Path)
    join.add_argument("--markdown", metavar="FILE", type=Path)
    join.set_defaults(answer=_merge)

    one = commands.add_parser("diff", parents=[where], help="two baselines side by side, or all of two folders")
    one.add_argument("cases", metavar="CASE", nargs="*", help=f"A and B, each {case_help}")
    one.add_argument("--against", metavar="DIR", type=Path, help="A is this folder's: every case, or the one CASE")
    one.set_defaults(answer=_diff, usage=one.error)
    return parser
