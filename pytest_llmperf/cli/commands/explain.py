"""``llmperf explain``: a step, part by part, of a case that somebody names; and two of them side by side."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_llmperf.analysis.likely_causes import CATEGORIES, COMMUNICATION, category
from pytest_llmperf.analysis.step_difference import (
    ORDER,
    count_moved,
    hidden_seconds,
    milliseconds,
    parts_of,
    points_to,
    short_kernel,
    step_difference,
)
from pytest_llmperf.cli.answer import Answer, CaseError, Screen, add_place, table
from pytest_llmperf.cli.baseline_folder import find
from pytest_llmperf.records.metrics import METRICS
from pytest_llmperf.records.results_document import ResultsError, document_of, launch_of, read_values
from pytest_llmperf.records.trace import COUNTED, WORK, Trace, TraceRow
from pytest_llmperf.report.text import Column, one_line
from pytest_llmperf.support import formats
from pytest_llmperf.support.user_input import hint

_INDENT = "  "
_MOST_NAMES = 3
_MOST_MOVED = 6


def add_options(parser: argparse.ArgumentParser) -> None:
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


# The trace that a word names: of a stored case, or in a file of results.
@dataclass(frozen=True)
class Traced:
    case: str
    name: str
    """Of the case, and where it is of."""
    trace: Trace
    versions: Mapping[str, str]


def traced(word: str, baselines: Path, machine: str | None) -> Traced:
    """The trace of a stored case, or of ``RESULTS.json`` (its only case) or ``RESULTS.json:ID``."""
    path, _, name = word.partition(".json:")
    if name:
        return _of_results(Path(f"{path}.json"), name)
    if word.endswith(".json"):
        file = Path(word)
        if not file.exists():
            raise CaseError(f"{word}: no such file; expected one of --perf-json, or a baseline's")
        with suppress(OSError):  # the case's own search says what is wrong with it
            if '"results"' in file.read_text(encoding="utf-8", errors="replace"):
                return _of_results(file, "")
    stored = find(word, baselines, machine)
    kept = stored.baseline.trace
    if kept is None:
        raise CaseError(
            f"{stored.path}: no launch that was recorded had a trace; record the case once more with --update-baselines"
        )
    return Traced(stored.baseline.id, stored.baseline.id, kept.trace, kept.versions)


def _of_results(path: Path, name: str) -> Traced:
    try:
        results = document_of(read_values(path)).results
    except ResultsError as error:
        raise CaseError(str(error)) from error
    ids = [result.id for result in results]
    if not name and len(ids) != 1:
        raise CaseError(f"{path}: it has {len(ids)} cases, name one: {path}:{ids[0] if ids else 'ID'}")
    name = name or ids[0]
    found = [result for result in results if result.id == name]
    if not found:
        raise CaseError(f"{path}: no case {name}{hint(name, ids)}")
    try:
        launches = [launch_of(record) for record in found[-1].launches]
    except ValueError as error:
        raise CaseError(f"{path}: the launches of {name} cannot be read ({error})") from error
    for launch in reversed(launches):
        if launch.trace:
            return Traced(name, f"{name} of {path.name}", launch.trace, launch.environment.versions)
    why = launches[-1].trace.none if launches else "it was not launched"
    raise CaseError(f"{path}: {name} has no trace ({why})")


# Its pages.
def step_page(one: Traced, screen: Screen) -> Iterator[str]:
    parts, trace = parts_of(one.trace), one.trace
    names = [name for name in ORDER if parts.get(name)]

    def rows_of(part: str) -> list[TraceRow]:
        rows = (row for row in trace.rows if row.kind in WORK and category(row.kind, row.name) == part)
        return sorted(rows, key=lambda row: -row.seconds)

    def longest(part: str) -> str:
        kernels = dict.fromkeys(short_kernel(row.name) for row in rows_of(part))
        return ", ".join([*kernels][:_MOST_NAMES]) or formats.ABSENT

    calls = [f"{sum(row.count for row in rows_of(name)):g}" if name in CATEGORIES else formats.ABSENT for name in names]
    shares = [parts[name] / trace.step_seconds if trace.step_seconds else None for name in names]
    columns = [
        Column("part", names, right=False),
        Column("ms a step", [f"{parts[name] * 1000:.2f}" for name in names]),
        Column("share", [*map(formats.share, shares)]),
        Column("calls", calls),
        Column("most of it", [*map(longest, names)], right=False),
    ]
    yield one_line(f"{one.name}: {_size(trace)}")
    yield from table(columns, screen)
    if trace.is_on_host:
        return
    hidden = hidden_seconds(trace)
    if hidden > 0:
        yield f"{hidden * 1000:.2f} ms of {COMMUNICATION} are hidden behind other kernels"
    waits = [f"{row.name} {row.count:g}" for row in trace.rows if row.kind == "wait"]
    yield f"the host waits for its device: {', '.join(waits) or 'never'}"


def difference_page(before: Traced, after: Traced, screen: Screen) -> Iterator[str]:
    difference = step_difference(before.trace, after.trace)
    yield one_line(f"before: {before.name}: {_size(before.trace)}")
    yield one_line(f"after:  {after.name}: {_size(after.trace)}")
    if before.case != after.case:
        yield one_line(f"two cases: what {after.case} does need not be what {before.case} does")
    yield one_line(points_to(difference))
    parts = [part for part in difference.parts if part.before or part.after]
    # Parts and what is unexplained add up to the step, in each column.
    sides = [
        *((part.name, part.before, part.after) for part in parts),
        ("unexplained", _unexplained(before.trace), _unexplained(after.trace)),
        ("the step", before.trace.step_seconds, after.trace.step_seconds),
    ]
    columns = [
        Column("part", [name for name, _, _ in sides], right=False),
        Column("before", [f"{then * 1000:.2f} ms" for _, then, _ in sides]),
        Column("after", [f"{now * 1000:.2f} ms" for _, _, now in sides]),
        Column("change", [milliseconds(now - then) for _, then, now in sides]),
    ]
    yield from table(columns, screen)
    for part in parts:
        for change in part.names[:_MOST_MOVED]:
            yield _INDENT + one_line(
                f"{part.name}: {count_moved(change)}, {milliseconds(change.seconds)}: {change.name}"
            )
        if len(part.names) > _MOST_MOVED:
            yield f"{_INDENT}{part.name}: {len(part.names) - _MOST_MOVED} more"
    for change in difference.waits:
        yield _INDENT + one_line(f"waits of the host: {change.name} {count_moved(change)}")
    for name in sorted({*before.versions} | {*after.versions}):
        then, now = before.versions.get(name, "none"), after.versions.get(name, "none")
        if then != now:
            yield one_line(f"different: {name}: {then} -> {now}")


def _unexplained(trace: Trace) -> float:
    """Below nothing where kernels ran beside one another; nothing where it is less than is shown."""
    return round(trace.step_seconds - sum(parts_of(trace).values()), 6) + 0.0


def _size(trace: Trace) -> str:
    known = {name: trace.count(name) for name in COUNTED if METRICS[name].unit != "bytes" and trace.count(name)}
    counts = [f"{count:g} {name.removesuffix('_per_step')}" for name, count in known.items()]
    ranks = f" on each of {trace.ranks} ranks" if trace.ranks > 1 else ""
    return f"{trace.step_seconds * 1000:.1f} ms a step{ranks}, {', '.join(counts)}"
