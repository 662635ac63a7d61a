"""The command: arguments in, lines printed, an exit code out. All that prints is here."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pytest_llmperf.cli.arguments import arguments_parser
from pytest_llmperf.cli.baseline_folder import CaseError, Shelf, Stored, find, find_any
from pytest_llmperf.cli.baselines import conflict
from pytest_llmperf.cli.baselines.diff import against_page, diff_page, pairs_of
from pytest_llmperf.cli.baselines.views import (
    capacity_page,
    history_capacity_page,
    history_page,
    list_page,
    show_capacity_page,
    show_page,
)
from pytest_llmperf.cli.check import command as check_command
from pytest_llmperf.cli.explain.step_pages import difference_page, step_page
from pytest_llmperf.cli.explain.traced import traced
from pytest_llmperf.cli.left_out_widths import left_out
from pytest_llmperf.cli.merge import night_results
from pytest_llmperf.cli.merge.notice import Notice
from pytest_llmperf.cli.plan.memory_pages import Prediction, columns, document, page, predictions, record
from pytest_llmperf.cli.predict import forecast_pages
from pytest_llmperf.cli.predict.forecast import outlook
from pytest_llmperf.cli.report import ladder_tables, purpose, scaling_tables
from pytest_llmperf.cli.report import purpose_pages as answer
from pytest_llmperf.cli.screen import Screen, table
from pytest_llmperf.cli.spec_arguments import Named, all_stored, named
from pytest_llmperf.cli.submit import night, templates
from pytest_llmperf.cli.submit.cluster_file import ClusterError
from pytest_llmperf.insight.chapter15 import STEPS
from pytest_llmperf.insight.ladder import Extent
from pytest_llmperf.judge.baseline_file import BaselineError
from pytest_llmperf.report.exports import comma_separated, markdown
from pytest_llmperf.report.text import fold, glyphs_of, one_line

_INTERRUPTED = 130  # 128 and SIGINT, as shells say it


@dataclass(frozen=True)
class _Answer:
    lines: Iterable[str]
    troubles: Sequence[str] = ()
    """For standard error, a line each; one is enough for exit code 1. Lines that take their time may add to it."""
    for_programs: bool = False
    """Whether its lines are a format that no terminal's width may break."""
    acts: bool = False
    """Whether its lines tell of what is done meanwhile: that goes on to its end, read or not."""


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
    arguments = arguments_parser().parse_args(argv)
    screen = _screen()
    try:
        answer = _ANSWERS[arguments.command](arguments, screen)
    except (BaselineError, CaseError, ClusterError) as error:
        answer = _Answer([], str(error).splitlines())
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # there is no standard output after >&-
    width, lost = None if answer.for_programs else screen.width, list[str]()
    for line in answer.lines:
        for part in fold(line, width, indent="    ") or [""]:
            try:
                # At once: a prediction takes seconds, and whoever reads may have seen enough.
                print(part.encode(encoding, "backslashreplace").decode(encoding), flush=True)
            except OSError as error:
                if not answer.acts:
                    raise
                _discard_output()
                lost = [] if isinstance(error, BrokenPipeError) else [str(error)]
    troubles = [*answer.troubles, *lost]
    for line in troubles:
        print(f"llmperf: {one_line(line)}", file=sys.stderr)
    return 1 if troubles else 0


def _screen() -> Screen:
    # A pipe or a file gets lines as long as they are: one case, one line.
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else None
    return Screen(width, glyphs_of(getattr(sys.stdout, "encoding", None)))


def _list(arguments: argparse.Namespace, screen: Screen) -> _Answer:
    shelf = Shelf.read(arguments.perf_baselines, arguments.machine)
    pages = [*list_page(shelf.stored, screen), *capacity_page(shelf.capacities, screen)]
    return _Answer(pages, shelf.troubles)


def _show(arguments: argparse.Namespace, screen: Screen) -> _Answer:
    found = find_any(arguments.case, arguments.perf_baselines, arguments.machine)
    return _Answer(show_page(found, screen) if isinstance(found, Stored) else show_capacity_page(found))


def _history(arguments: argparse.Namespace, screen: Screen) -> _Answer:
    found = find_any(arguments.case, arguments.perf_baselines, arguments.machine)
    if isinstance(found, Stored):
        return _Answer(history_page(found, screen))
    return _Answer(history_capacity_page(found, screen))


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


def _explain(arguments: argparse.Namespace, screen: Screen) -> _Answer:
    root, machine, usage = arguments.perf_baselines, arguments.machine, arguments.usage
    if arguments.other and arguments.against:
        usage("expected OTHER or --against DIR, not both")
    one = traced(arguments.case, root, machine)
    if arguments.other:
        return _Answer(difference_page(one, traced(arguments.other, root, machine), screen))
    if arguments.against:
        return _Answer(difference_page(traced(arguments.case, arguments.against, machine), one, screen))
    return _Answer(step_page(one, screen))


def _unite(arguments: argparse.Namespace, _screen: Screen) -> _Answer:
    usage: Callable[[str], NoReturn] = arguments.usage
    match arguments.files:
        case [path]:
            return _Answer([conflict.resolve(path)])
        case [base, ours, theirs, *name] if len(name) <= 1:
            return _Answer([], conflict.drive(base, ours, theirs, str([*name, ours][0])))
    return usage("expected a FILE in conflict, or BASE OURS THEIRS and at most a name, as a merge driver gets them")


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
    troubles = shelf.troubles
    try:
        machine, found = ladder_tables.ladders(shelf)
    except CaseError as error:
        return _Answer([], [*troubles, str(error)])
    scaled = scaling_tables.scalings(shelf)
    match arguments.format:
        case "csv":
            return _Answer(ladder_tables.csv_page(machine, found, extent, scaled), troubles, for_programs=True)
        case "markdown":
            return _Answer(ladder_tables.markdown_page(machine, found, extent, scaled), troubles, for_programs=True)
    return _Answer(ladder_tables.text_page(machine, found, extent, screen, scaled), troubles)


def _purpose(arguments: argparse.Namespace, screen: Screen) -> _Answer:
    found, troubles = purpose.asked(arguments)
    match arguments.format:
        case "csv":
            return _Answer(answer.csv_page(found), troubles, for_programs=True)
        case "markdown":
            return _Answer(answer.markdown_page(found), troubles, for_programs=True)
    return _Answer(answer.text_page(found, screen), troubles)


def _predict(arguments: argparse.Namespace, screen: Screen) -> _Answer:
    found = outlook(arguments)
    if arguments.json:
        return _Answer([json.dumps(forecast_pages.document(found))], for_programs=True)
    match arguments.format:
        case "csv":
            return _Answer(forecast_pages.csv_page(found), for_programs=True)
        case "markdown":
            return _Answer(forecast_pages.markdown_page(found), for_programs=True)
    return _Answer(forecast_pages.text_page(found, screen))


def _extent(arguments: argparse.Namespace) -> Extent | None:
    samples, steps, hours = arguments.samples, arguments.steps, arguments.hours
    if samples is not None:
        return Extent(samples, STEPS if steps is None else steps, hours)
    usage: Callable[[str], NoReturn] = arguments.usage
    return None if steps is None and hours is None else usage("--steps and --hours need --samples: epochs of what?")


def _check(arguments: argparse.Namespace, screen: Screen) -> _Answer:
    return _Answer(*check_command.answer(arguments, screen), acts=True)


def _submit(arguments: argparse.Namespace, _screen: Screen) -> _Answer:
    usage: Callable[[str], NoReturn] = arguments.usage
    if arguments.example is not None:
        if arguments.cluster or arguments.script or arguments.dry_run:
            usage("--example submits nothing; expected it alone")
        lines = templates.example(arguments.example) if arguments.example else templates.listed()
        return _Answer(lines, for_programs=True)
    if arguments.cluster is None:
        usage("expected CLUSTER.ini, or --example to start one")
    script = arguments.script or templates.folder() / "nightly.sbatch"
    return _Answer(*night.submitted(arguments.cluster, script, dry_run=arguments.dry_run), acts=True)


def _merge(arguments: argparse.Namespace, _screen: Screen) -> _Answer:
    without = left_out(arguments.without)
    if without is None:
        arguments.usage(f"--without {' '.join(arguments.without)}: expected numbers of GPUs, or the word wider")
    found = night_results.gather(arguments.results, arguments.expect, without)
    told = Notice(arguments.results[0].name, name=arguments.name, mail=arguments.mail, nights=arguments.nights)
    return _Answer(*night.merged(found, arguments.json, arguments.markdown, told), acts=True)


def _against(a: Shelf, b: Shelf, screen: Screen) -> _Answer:
    troubles = [*a.troubles, *b.troubles]
    if not pairs_of(a, b):
        line = f"{a.root}: no case in common with {b.root}, expected the same digests and machines; name two cases"
        return _Answer([], [*troubles, line])
    return _Answer(against_page(a, b, screen), troubles)


_ANSWERS: Mapping[str, Callable[[argparse.Namespace, Screen], _Answer]] = {
    "list": _list,
    "show": _show,
    "history": _history,
    "diff": _diff,
    "explain": _explain,
    "unite": _unite,
    "plan": _plan,
    "report": _report,
    "predict": _predict,
    "check": _check,
    "submit": _submit,
    "merge": _merge,
}
