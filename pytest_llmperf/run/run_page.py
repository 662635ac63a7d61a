"""A page of runs: their documents and what is stored in, the page as data out, each case a row of it; and its file."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_llmperf.analysis.ladder import NOTES
from pytest_llmperf.judge.baseline import ANY_MACHINE, BaselineStore
from pytest_llmperf.judge.case_histories import CaseHistory
from pytest_llmperf.records.metrics import METRICS, RATE, formatted, label, rate_of
from pytest_llmperf.report.page import FOR_A_PERSON, Case, Cell, Page, Section, Table, html
from pytest_llmperf.report.results_json import Result, RunDocument
from pytest_llmperf.report.summary_table import no_gate_of_speed, time_parts, without_name
from pytest_llmperf.report.text import FigureCell, detectable_words, figure_cells, one_line
from pytest_llmperf.run import page_charts
from pytest_llmperf.run.history import histories_of
from pytest_llmperf.support import formats
from pytest_llmperf.support.files import write_text

_MOST_SKIPPED = 200
_MOST_HOSTS = 4


def page_of(
    documents: Sequence[RunDocument],
    stored: page_charts.Baselines,
    left_out: Sequence[str] = (),
    histories: Sequence[CaseHistory] = (),
) -> Page:
    """The page of ``documents``, beside what is ``stored`` of their machine kinds. ``left_out``: a line for each file
    that is not in it. ``histories``: of cases that ran before."""
    results = [result for document in documents for result in document.results]
    machines = dict.fromkeys(document.machine for document in documents)
    where = ", ".join("no machine, by --perf-static" if kind == ANY_MACHINE else kind for kind in machines)
    gate = no_gate_of_speed(result.figure(RATE) for result in results)
    left = len(results) - MOST_CASES
    cut = [f"{left} of {len(results)} cases are left out here, those first that pass; --perf-json has all"] * (left > 0)
    troubles = [
        f"{document.source}: {line}" if document.source else line
        for document in documents
        for line in _troubles(document)
    ]
    skipped = [
        (_clipped(each.id), _clipped(without_name(each.id, each.reason)))
        for document in documents
        for each in document.record.skipped
    ]
    # Of each case on each machine kind, of two runs the last that was named.
    newest = {(result.machine, result.id): result for result in results}
    ladders, changed = page_charts.ladder_section([*newest.values()]), page_charts.history_section(histories)
    # Where published figures come from, and how they differ from ours.
    sources = dict.fromkeys(filter(None, (one.record.reference.source for one in results if one.record.reference)))
    return Page(
        title=f"pytest-llmperf on {where}" if documents else "pytest-llmperf",
        runs=tuple(map(_facts, documents)),
        warnings=tuple(map(_clipped, (*left_out, *troubles, *cut))),
        remarks=(gate,) if gate else (),
        columns=headings(documents),
        main=_MAIN,
        cases=_rows(documents, stored),
        sections=tuple(filter(None, (ladders, changed, _time_section(documents)))),
        skipped=tuple(skipped[:_MOST_SKIPPED]),
        notes=(f"published: {'; '.join(sources)}", *NOTES) if sources else (),
    )


def _facts(document: RunDocument) -> tuple[tuple[str, str], ...]:
    record, launches = document.record, [launch for result in document.results for launch in result.launches]
    began = min((launch.started_at for launch in launches), default="")
    spent = sum(record.spent.phases.values()) if record.spent else 0.0
    number = record.spent.launches if record.spent else sum(len(one.launches) for one in record.results)
    versions = launches[0].environment.versions if launches else record.versions
    hosts = sorted({rank.host for launch in launches for rank in launch.ranks})
    hardware = f"{len(document.gpus)} × {document.gpus[0]}" if document.gpus else "CPU"
    facts = {
        "run": document.source,
        "project": record.project.rpartition("/")[2],
        "commit": str(record.revision or ""),
        "host": formats.first_n(hosts, _MOST_HOSTS),
        "command": record.command,
        "machine": f"{document.machine}, " + ("nothing was launched" if document.machine == ANY_MACHINE else hardware),
        "began": f"{began.replace('T', ' ').removesuffix('Z')} UTC" if began else "",
        "launches": f"{number} in {formats.seconds(spent)}" if spent else str(number or ""),
        "versions": ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions),
        "exit code": "" if record.exit_code is None else str(record.exit_code),
    }
    return tuple((name, _clipped(value)) for name, value in facts.items() if value)


def _troubles(document: RunDocument) -> Iterator[str]:
    record = document.record
    if record.unfinished:
        yield f"the run ended before its end ({record.unfinished}): what is missing here was not judged"
    yield from record.troubles
    for test in record.tests:
        if test.has_failed:
            yield ": ".join(filter(None, vars(test).values()))
    yield from filter(None, [*(common.told for common in record.common.values()), record.unjudged])
    if document.schema != 1:
        yield f"schema {document.schema}, of an older version: what it does not say is not shown"
    if unread := sum(result.num_unread for result in document.results):
        what = "1 launch cannot be read and is" if unread == 1 else f"{unread} launches cannot be read and are"
        yield f"{what} not shown, as of another version or damaged; the cases' figures are"


# Rows: every case with its figures, and what it opens to.

# The heading of the column that is there where several runs are.
_RUN = "run"
# The columns that a phone has room for.
_MAIN = ("tokens/s/GPU", "change", "peak memory")

# What has no noise: one more than its limit is told by one launch.
_EXACT = {"flops_per_step", *(name for name, row in METRICS.items() if row.rule == "count")}

# Of so many first cases steps are drawn, and so many open to all that is known: megabytes more nobody waits for.
_MOST_CHARTS, MOST_OPENED, MOST_CASES = 40, 160, 2500
_LONGEST_LINE, _LONGEST_NAME = 600, 240
_MOST_LINES, _MOST_SHORT = 40, 6


def _clipped(text: str, most: int = _LONGEST_LINE) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def headings(documents: Sequence[RunDocument]) -> tuple[str, ...]:
    """The columns after case and verdict for which any case has a figure."""
    cases = [_cells(result) for document in documents for result in document.results]
    told = {name for cells in cases for name, cell in cells.items() if cell.text not in (formats.ABSENT, "0")}
    names = dict.fromkeys(name for cells in cases for name in cells if name in told)
    return (*((_RUN,) if len(documents) > 1 else ()), *names)


def _cells(result: Result) -> dict[str, Cell]:
    number = len(result.record.launches)
    cells = [*figure_cells("page", result.record.metrics.get), FigureCell("launches", str(number), float(number))]
    # What is absent comes first upwards and last downwards, apart from all figures.
    return {cell.heading: Cell(cell.text, -math.inf if cell.value is None else cell.value) for cell in cells}


def _rows(documents: Sequence[RunDocument], stored: page_charts.Baselines) -> tuple[Case, ...]:
    """Every case, those first that somebody has to look at, and in the order in which they ran among equals."""
    names = headings(documents)
    all_of_them = [(document, result) for document in documents for result in document.results]
    found = list[Case]()
    urgent = {verdict: place for place, verdict in enumerate(FOR_A_PERSON)}
    ordered = sorted(all_of_them, key=lambda each: urgent.get(each[1].verdict, len(urgent)))
    for document, result in ordered[:MOST_CASES]:
        record, number = result.record, len(found)
        charts = (
            [page_charts.step_chart(result, stored), *page_charts.soak_charts(result)] if number < _MOST_CHARTS else []
        )
        cells = {_RUN: Cell(document.source or document.machine), **_cells(result)}
        medians = [formats.seconds(launch.median_step_seconds) for launch in result.launches[:_MOST_SHORT]]
        short = f"median steps: {', '.join(medians)}" if medians else "no launch"
        # What is lost, what traces point to, and that a case which was new is so no more.
        reasons = (record.reason, record.diagnosis, "recorded by this run" if record.updated else "")
        found.append(
            Case(
                anchor=f"case-{number + 1}",
                name=_clipped(result.id, _LONGEST_NAME),
                verdict=result.verdict if result.verdict.isalpha() else "unknown",
                reason=_clipped("; ".join(filter(None, reasons))),
                cells=tuple(cells[name] for name in names),
                commands=_commands(document, result),
                short=f"{short}; what else is known of it is in the --perf-json file.",
                lists=_lists(result) if number < MOST_OPENED else (),
                charts=tuple(filter(None, charts)),
                tables=_tables(result, stored) if number < MOST_OPENED else (),
            )
        )
    return tuple(found)


def _commands(document: RunDocument, result: Result) -> tuple[tuple[str, str], ...]:
    """The commands that run its test again, and accept its figures where they are not the baseline's."""
    if not (nodeid := result.record.nodeid):
        return ()
    # For a document that does not say how it was run its id tells as much.
    gpus = (page_charts.parts_of_name(result.id)[2] or len(document.gpus)) if document.gpus else 0
    again = shlex.join(document.rerun(nodeid) or ["pytest", nodeid, "--gpus", str(gpus)])
    record = ""
    if result.verdict == "new":
        record = " --update-baselines=new"
    elif result.verdict in ("regressed", "improved", "changed") or (result.verdict == "pass" and result.record.changed):
        record = " --update-baselines" + ("" if result.verdict == "improved" else ' --perf-reason "why"')
    accept = (("Accept it", _clipped(f"{again}{record}")),) if record and not result.record.soak else ()
    return (("Run it again", _clipped(again)), *accept)


def _lists(result: Result) -> tuple[tuple[str, tuple[str, ...]], ...]:
    record, notes = result.record, list(result.record.notes)
    if result.num_unread:
        notes.append(f"{result.num_unread} launches have records that this version cannot read")
    lists: dict[str, Sequence[str]] = {
        "Why": list(filter(None, [record.reason, record.diagnosis])),
        "Changed since the baseline, and exact": record.changed,
        "Different from the baseline's environment": record.differences,
        "Notes": notes,
        "Recorded": [line.strip() for line in record.updated.splitlines() if line.strip()],
    }
    shown = []
    for title, lines in lists.items():
        more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
        shown.append((title, (*map(_clipped, lines[:_MOST_LINES]), *more)))
    return tuple((title, lines) for title, lines in shown if lines)


def _tables(result: Result, stored: page_charts.Baselines) -> tuple[tuple[str, Table], ...]:
    own = (("Exact counts", _counts(result)), ("Figures", _figures(result)), ("Launches", _launches(result)))
    return tuple((title, table) for title, table in (*own, *page_charts.trace_tables(result, stored)) if table.rows)


def _counts(result: Result) -> Table:
    found = [(name, figure) for name, figure in result.record.metrics.items() if name in _EXACT]
    values = ((name, (one.baseline, one.value, one.limit), one.unit) for name, one in found)
    rows = tuple((label(name), *(formatted(name, each, unit) for each in three)) for name, three, unit in values)
    return Table(("exact count", "was", "now", "limit"), rows)


def _figures(result: Result) -> Table:
    found = []
    for metric, figure in result.record.metrics.items():
        name = _clipped(label(metric), _LONGEST_NAME) + (f" ({_clipped(figure.detail)})" if figure.detail else "")
        values = (formatted(metric, each, figure.unit or "1") for each in (figure.value, figure.baseline, figure.limit))
        change = formats.percent(figure.change), page_charts.interval_words(figure), detectable_words(figure)
        found.append((name, *values, *change))
    return Table(("metric", "value", "baseline", "limit", "change", "nine times in ten", "detectable"), tuple(found))


def _launches(result: Result) -> Table:
    rows = []
    sides = [("", one) for one in result.launches] + [("before: ", one) for one in result.launches_before]
    for side, launch in sides:
        ranks, health, rate = launch.ranks, launch.health, rate_of([launch])
        hosts = ", ".join(sorted({rank.host for rank in ranks}))
        device = ranks[0].device if len(ranks) == 1 else f"{len(ranks)} ranks"
        cells = (
            *(_clipped(text, _LONGEST_NAME) for text in (f"{side}{launch.started_at}", hosts, device)),
            f"{len(launch.step_seconds)}, {launch.steady.start} warm-up",
            *map(formats.seconds, (launch.median_step_seconds, launch.first_step_seconds)),
            formatted(rate, launch.tokens_per_second_per_gpu, METRICS[rate].unit),
            formats.memory(launch.peak_reserved_bytes),
            formats.seconds(launch.wall_seconds),
            f"{health.sm_clock_mhz:.0f} MHz" if health.sm_clock_mhz else formats.ABSENT,
            f"{health.power_watts:.0f} W" if health.power_watts else formats.ABSENT,
        )
        rows.append(cells)
    headings = ("launch", "host", "device", "steps", "median step", "first step")
    return Table((*headings, "tokens/s/GPU", "reserved", "wall", "clock", "power"), tuple(rows), 3)


def _time_section(documents: Sequence[RunDocument]) -> Section | None:
    """What the seconds of each run's launches went to, and how long they took by the clock, which overlaps shorten."""
    tables = list[tuple[str, Table]]()
    for document in documents:
        parts = time_parts(document.record.spent.phases) if document.record.spent else {}
        if parts:
            covered = reached = 0.0
            for start, end in sorted(launch.ran for result in document.results for launch in result.launches):
                covered += max(0.0, end - max(start, reached))
                reached = max(reached, end)
            rows = tuple((name, formats.seconds(seconds)) for name, seconds in parts.items())
            bars = tuple(seconds / max(parts.values()) for seconds in parts.values())
            title = f"{_clipped(document.source or document.machine)}: {formats.seconds(covered)} in cases by the clock"
            tables.append((title, Table(("phase", "of launches"), rows, bars=bars)))
    return Section(anchor="time", title="Where the time went", tables=tuple(tables)) if tables else None


# The page as a file: what is read and written around it.
def write_page(
    path: Path, runs: Sequence[RunDocument], baselines: Path, history: Path | None, left_out: Sequence[str] = ()
) -> tuple[str, Sequence[str]]:
    """Write the page of ``runs`` beside what is stored in ``baselines``, and the store of runs before these,
    ``history``; why there is none, and a line for each thing of its history that is not on it. ``left_out`` has a line
    for each run that could not be read. Nothing is raised: a run that is over has been judged and told."""
    try:
        broken, store, machines = list[str](), BaselineStore(baselines), sorted({run.machine for run in runs})
        stored = {(name, one.digest): one for name in machines for one in store.baselines(name, broken)}
        histories, troubles = histories_of(runs, history, baselines)
        left_out = [*left_out, *troubles, *broken]
        write_text(path, html(page_of(runs, stored, left_out, histories)))
    except OSError as error:
        return f"{path}: no page was written ({error.strerror or error})", ()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the page's and not the run's
        why = one_line(f"{type(error).__name__}: {error}")
        return f"{path}: no page was written ({why}); llmperf report RESULTS --html FILE tries again", ()
    return "", troubles
