"""The command: the options of each of its own commands, and what they answer."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from pytest_llmperf.cli.answer import Answer, NotStoredError
from pytest_llmperf.cli.arguments import add_place
from pytest_llmperf.cli.baseline_folder import CurveShelf, Shelf, Stored, find, find_any, is_of_curves, refuse_curves
from pytest_llmperf.cli.baselines.pages import (
    against_page,
    capacity_page,
    curve_list_page,
    curve_page,
    diff_page,
    history_capacity_page,
    history_page,
    list_page,
    pairs_of,
    show_capacity_page,
    show_page,
)
from pytest_llmperf.cli.screen import Screen
from pytest_llmperf.judge import store
from pytest_llmperf.judge.loss_curves import CurveBaseline


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of ``llmperf baselines``."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("list", help="every baseline on a line")
    add_place(one)
    one.set_defaults(answer=_list)
    case_help = "a spec's id, 6 digits or more of its digest, or a baseline's file"
    for name, answer, text in (
        ("show", _show, "one baseline: settings, launches, environment"),
        ("history", _history, "every acceptance of one baseline, and why"),
    ):
        one = commands.add_parser(name, help=text, description=text)
        add_place(one)
        one.add_argument("case", metavar="CASE", help=case_help)
        one.set_defaults(answer=answer)
    one = commands.add_parser("diff", help="two baselines side by side, or all of two folders")
    add_place(one)
    one.add_argument("cases", metavar="CASE", nargs="*", help=f"A and B, each {case_help}")
    one.add_argument("--against", metavar="DIR", type=Path, help="A is this folder's: every case, or the one CASE")
    one.set_defaults(answer=_diff, usage=one.error)


def _list(arguments: argparse.Namespace, screen: Screen) -> Answer:
    root, machine = arguments.perf_baselines, arguments.machine
    curves = CurveShelf.read(root, machine)
    pages, troubles = curve_list_page(curves.stored, screen), list(curves.broken)
    try:
        shelf = Shelf.read(root, machine)
    except NotStoredError:
        if not pages and not troubles:
            raise
        return Answer(pages, troubles)
    own = [*list_page(shelf.stored, screen), *capacity_page(shelf.capacities, screen)]
    return Answer([*own, *([""] if own and pages else []), *pages], [*shelf.troubles, *troubles])


def _show(arguments: argparse.Namespace, screen: Screen) -> Answer:
    """A case's baseline, and its loss curves."""
    case, root, machine = arguments.case, arguments.perf_baselines, arguments.machine
    if is_of_curves(case):
        path = Path(case)
        found = store.read(path, CurveBaseline)
        return Answer([] if found is None else curve_page(path, found, screen))
    curves = CurveShelf.read(root, machine).of(case)
    pages = [curve_page(one.path, one.baseline, screen) for one in curves.stored]
    try:
        baseline = find_any(case, root, machine)
    except NotStoredError:
        if not pages and not curves.broken:
            raise
    else:
        own = show_page(baseline, screen) if isinstance(baseline, Stored) else show_capacity_page(baseline)
        pages = [own, *pages]
    lines = [line for page in pages for line in ("", *page)]
    return Answer(lines[1:], list(curves.broken))


def _history(arguments: argparse.Namespace, screen: Screen) -> Answer:
    refuse_curves(arguments.case)
    found = find_any(arguments.case, arguments.perf_baselines, arguments.machine)
    if isinstance(found, Stored):
        return Answer(history_page(found, screen))
    return Answer(history_capacity_page(found, screen))


def _diff(arguments: argparse.Namespace, screen: Screen) -> Answer:
    root, machine = arguments.perf_baselines, arguments.machine
    for case in arguments.cases:
        refuse_curves(case)
    match arguments.cases, arguments.against:
        case [a, b], None:
            return Answer(diff_page(find(a, root, machine), find(b, root, machine), screen))
        case [one], Path() as other:
            return Answer(diff_page(find(one, other, machine), find(one, root, machine), screen))
        case [], Path() as other:
            return _against(Shelf.read(other, machine), Shelf.read(root, machine), screen)
    usage: Callable[[str], NoReturn] = arguments.usage
    return usage("expected two cases, or --against DIR and at most one case")


def _against(a: Shelf, b: Shelf, screen: Screen) -> Answer:
    troubles = [*a.troubles, *b.troubles]
    if not pairs_of(a, b):
        line = f"{a.root}: no case in common with {b.root}, expected the same digests and machines; name two cases"
        return Answer([], [*troubles, line])
    return Answer(against_page(a, b, screen), troubles)
