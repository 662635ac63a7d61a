"""The command line: arguments in, lines printed, an exit code out. All that prints is here."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pytest_llmperf.cli.diff import against_page, diff_page, pairs_of
from pytest_llmperf.cli.pages import Screen, history_page, list_page, show_page
from pytest_llmperf.cli.plan import document, page, predict, specs_of
from pytest_llmperf.cli.shelf import CaseError, Shelf, find
from pytest_llmperf.judge.baseline import BaselineError
from pytest_llmperf.report.text import fold, glyphs_of, one_line

_INTERRUPTED = 130  # 128 and SIGINT, as shells say it


@dataclass(frozen=True)
class _Answer:
    lines: Sequence[str]
    troubles: Sequence[str] = ()
    """For standard error, a line each; one is enough for exit code 1."""


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
    except (BaselineError, CaseError) as error:
        answer = _Answer([], str(error).splitlines())
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # there is no standard output after >&-
    for line in answer.lines:
        for part in fold(line, screen.width, indent="    ") or [""]:
            print(part.encode(encoding, "backslashreplace").decode(encoding))
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


def _plan(arguments: argparse.Namespace, _screen: Screen) -> _Answer:
    lines: list[str] = []
    for spec in specs_of(arguments.specs, arguments.perf_baselines):
        predicted = predict(spec)
        lines += [json.dumps(document(spec, predicted))] if arguments.json else page(spec, predicted)
    return _Answer(lines)


def _against(a: Shelf, b: Shelf, screen: Screen) -> _Answer:
    troubles = [*a.broken.values(), *b.broken.values()]
    if not pairs_of(a, b):
        line = f"{a.root}: no case in common with {b.root}, expected the same digests and machines; name two cases"
        return _Answer([], [*troubles, line])
    return _Answer(against_page(a, b, screen), troubles)


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

    plan = rooms.add_parser("plan", help="the memory that specs will need, predicted without a GPU")
    plan.add_argument("specs", metavar="SPEC", nargs="+", help="ids of stored cases, or one spec in key=value pairs")
    plan.add_argument("--json", action="store_true", help="one JSON document a line")
    plan.add_argument("--perf-baselines", metavar="DIR", type=Path, default=Path("baselines"))
    plan.set_defaults(answer=_plan)

    one = commands.add_parser("diff", parents=[where], help="two baselines side by side, or all of two folders")
    one.add_argument("cases", metavar="CASE", nargs="*", help=f"A and B, each {case_help}")
    one.add_argument("--against", metavar="DIR", type=Path, help="A is this folder's: every case, or the one CASE")
    one.set_defaults(answer=_diff, usage=one.error)
    return parser
