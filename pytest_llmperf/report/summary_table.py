"""The end of a run: one table of the cases as they ran, what was recorded, the totals."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from pytest_llmperf.records.failure import OTHER
from pytest_llmperf.records.metrics import RATE
from pytest_llmperf.records.result import NOT_RECORDED, USUAL, VERDICTS, CaseResult, Check, Spent
from pytest_llmperf.records.results_document import Figure
from pytest_llmperf.report.failure_message import headline
from pytest_llmperf.report.text import Column, Glyphs, figure_columns, fold, glyphs_of, one_line, render
from pytest_llmperf.support import formats, grouped
from pytest_llmperf.support.files import shipped

# What is said where speed is no gate, as on a CPU unless somebody chose a tolerance. Pure.


def wide_gates(results: Sequence[CaseResult]) -> str:
    """A line where a slow-down by a multiple passes; else empty."""
    return no_gate_of_speed(filter(None, (result.check(RATE) for result in results)))


def no_gate_of_speed(rates: Iterable[Check | Figure]) -> str:
    """Why cases of these ``rates`` fail only when they are several times slower, and what holds there all the same."""
    # Scatter of few launches moves a limit beyond its tolerance.
    gates = ((one.times_slower, (one.baseline or 0.0) / (one.limit or math.inf)) for one in rates)
    if not (wide := [max(times, limit) for times, limit in gates if times is not None]):
        return ""
    least = float(f"{min(wide):.2g}")  # of 152 that is 150, and not 1.5e+02
    return (
        f"CPU: speed is not gated (a case fails only when it is at least {least:g} times slower). Counts and "
        "losses are exact: more copies, waits or collectives fail, another difference fails with --perf-strict"
    )


# Notes of several cases in few lines: those that differ by a figure alone are one, with its range. Pure.

# What was measured stands alone, and has a unit or is a part of a count. Any other number is a name: a rank, a version.
_FIGURE = re.compile(r"(?<![\w.,/:-])[+-]?\d[\d,]*(?:\.\d+)?(?= %| of \d| (?:s|ms|MiB|GiB|tensors)\b)")

# A note that tells a range itself has no figure that another's could be put beside.
_RANGE = re.compile(r"\d(?: \S+)? to [+-]?\d")

_MOST_NAMED = 2


def merged_reasons(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """Why each of these cases was not run: one that several share once, with some of their names."""
    return merged_notes([(name, [without_name(name, why)]) for name, why in reasons], 0)


def without_name(name: str, why: str) -> str:
    """A reason says whose it is where it stands alone."""
    return re.sub(rf"^{re.escape(name)}:? ", "", why)


def merged_notes(cases: Iterable[tuple[str, Sequence[str]]], total: int) -> list[str]:
    """A line for each note of ``cases``; one that several have is told once, and of how many of the ``total``."""
    notes = ((name, note) for name, told in cases for note in dict.fromkeys(told))
    alike = grouped((note if _RANGE.search(note) else _FIGURE.sub("\0", note), (name, note)) for name, note in notes)
    return [_line(group, total) for group in alike.values()]


def of_cases(ids: Sequence[str], total: int) -> str:
    """``a, b and 3 more``; that it is all of them where it is."""
    return f"all {total} cases" if len(ids) == total > 1 else formats.first_n(ids, _MOST_NAMED)


def _line(group: Sequence[tuple[str, str]], total: int) -> str:
    first = group[0][1]
    ranges = iter([_range(figures) for figures in zip(*(_FIGURE.findall(note) for _, note in group), strict=True)])
    note = _FIGURE.sub(lambda _: next(ranges), first)
    if note != first:
        # Whoever looks at one of them looks at the one that has most of it.
        group = sorted(group, key=lambda each: [abs(_number(f)) for f in _FIGURE.findall(each[1])], reverse=True)
    ids = list(dict.fromkeys(name for name, _ in group))
    if len(ids) == 1:
        return f"{ids[0]}: {note}"
    which = of_cases(ids, total) if note == first else f"most: {', '.join(ids[:_MOST_NAMED])}"
    return f"{len(ids)} cases: {note} ({which})"


def _range(figures: Sequence[str]) -> str:
    low, high = min(figures, key=_number), max(figures, key=_number)
    return low if _number(low) == _number(high) else f"{low} to {high}"


def _number(figure: str) -> float:
    return float(figure.replace(",", ""))


# A failing case has said why in its own message.
_EXPLAINED = frozenset({"pass", "regressed", "invalid", "new"})
_MOST_SOURCES, _MOST_LINES = 3, 8


def summary_lines(  # noqa: PLR0913 - what is shown, and on what
    results: Sequence[CaseResult],
    width: int | None,
    color: bool,
    encoding: str | None = "utf-8",
    spent: Spent | None = None,
    *,
    verbose: bool = False,
) -> list[str]:
    """The table of ``results`` and what belongs below it, with what the run ``spent``, on launches that failed too.
    ``width``: the terminal's; ``None``: nothing is folded. No id and no figure is cut. ``encoding``: what the output
    cannot show is written in ASCII. ``verbose``: with notes that mean no fault."""
    if not results:
        return list(filter(None, [time_line(spent or Spent())]))
    glyphs = glyphs_of(encoding)
    size: dict[str, Any] = {"longest": math.inf} if verbose else {"where": " (-v)"}
    stored = [result for result in results if not result.launches_before]
    in_turns = [result for result in results if result.launches_before]
    below = [
        *_sources(results),
        *(
            f"{result.id}: {result.verdict}: {headline(result, result.reason, **size)[0]}"
            for result in results
            if result.verdict not in _EXPLAINED
        ),
        *_grouped("changed since the baseline", stored, lambda result: result.changed),
        *_grouped("not the same on both sides", in_turns, lambda result: result.changed),
        *_grouped("different from the baseline's environment", stored, lambda one: _differences(one, verbose=verbose)),
        *_grouped("different between the two sides", in_turns, lambda result: result.differences),
        *merged_notes(
            ((one.id, [note for note in one.notes if verbose or USUAL not in note]) for one in results), len(results)
        ),
        # Two tests of one training recorded it once.
        *(line for recorded in dict.fromkeys(map(_recorded, results)) for line in recorded),
        _totals(results, spent or Spent(), glyphs),
        *_hint(results),
    ]
    lines = render(_columns(results, glyphs, encoding), width, color)
    for line in below:
        # An update's own lines are aligned: their indent stays.
        margin = line[: len(line) - len(line.lstrip(" "))]
        lines += fold(margin + one_line(line, encoding), width, indent=margin + "  ")
    return lines


def _columns(results: Sequence[CaseResult], glyphs: Glyphs, encoding: str | None) -> list[Column]:
    """The columns that have something to show; the case and its verdict always have."""
    outcomes = [one_line(_outcome(result), encoding) or formats.ABSENT for result in results]
    found = [
        Column("case", [one_line(result.id, encoding) or formats.ABSENT for result in results], right=False),
        *figure_columns("summary", [result.check for result in results]),
        Column("verdict", outcomes, right=False, colored=True),
        Column("reference", [one_line(_reference(result, glyphs), encoding) for result in results], right=False),
    ]
    return [c for c in found if c.heading in ("case", "verdict") or {*c.cells} != {formats.ABSENT}]


def _outcome(result: CaseResult) -> str:
    """The verdict, what is not as it was, and what an update made of it: ``pass, changed, recorded``."""
    changed = "changed" if result.changed and result.verdict != "changed" else ""
    return ", ".join(filter(None, [result.verdict, changed, "recorded" if result.updated else ""]))


def _reference(result: CaseResult, glyphs: Glyphs) -> str:
    """``48,081 · 62.3 GiB (15.9)``: what was published for these settings, and where in the chapter."""
    reference, rung = result.reference, f"({result.rung})" if result.rung else ""
    if reference is None:
        return rung or formats.ABSENT
    rate = reference.tokens_per_second_per_gpu
    figures = "out of memory" if rate is None else formats.tokens_per_second(rate)
    if rate is not None and reference.peak_reserved_bytes is not None:
        figures += f" {glyphs.dot} {formats.memory(reference.peak_reserved_bytes)}"
    return f"{figures} {rung}".strip()


def _sources(results: Sequence[CaseResult]) -> list[str]:
    sources = list(dict.fromkeys(result.reference.source for result in results if result.reference))
    more = [f"and {len(sources) - _MOST_SOURCES} more"] if len(sources) > _MOST_SOURCES else []
    return [f"reference: {'; '.join(sources[:_MOST_SOURCES] + more)}"] if sources else []


def _grouped(title: str, results: Sequence[CaseResult], lines_of: Callable[[CaseResult], Sequence[str]]) -> list[str]:
    """A line for each thing that differs, and of which cases; what all cases of a night share is said once."""
    cases = grouped((line, result.id) for result in results for line in lines_of(result))
    lines = [f"{title}: {line} ({of_cases(ids, len(results))})" for line, ids in cases.items()]
    return lines[:_MOST_LINES] + ([f"{title}: {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else [])


# Of a host: a variable, and a package that somebody else's imports find there or do not.
_OF_A_HOST = re.compile(r"[A-Z][A-Z\d_]*: |\S+: (none -> |.* -> none$)")


def _differences(result: CaseResult, *, verbose: bool) -> Sequence[str]:
    """Of a case that is as it was not those of its host, which moved nothing."""
    if verbose or result.changed or result.verdict != "pass":
        return result.differences
    return [line for line in result.differences if not _OF_A_HOST.match(line)]


def _recorded(result: CaseResult) -> tuple[str, ...]:
    lines = tuple(line.rstrip() for line in result.updated.splitlines() if line.strip())
    return lines if not lines or result.id in lines[0] else (f"recorded {result.id}", *(f"  {line}" for line in lines))


def _totals(results: Sequence[CaseResult], spent: Spent, glyphs: Glyphs) -> str:
    """``3 pass, 1 regressed · 212 s in 5 launches: 150 s start-up, 58 s training``."""
    verdicts = [result.verdict for result in _cases(results)]
    ordered = [*reversed(VERDICTS), *sorted(set(verdicts) - set(VERDICTS))]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in ordered if verdict in verdicts]
    if len(verdicts) < len(results):
        counts[-1] += f" ({len(results)} tests of {len(verdicts)} case{'s' * (len(verdicts) != 1)})"
    return f" {glyphs.dot} ".join(filter(None, [", ".join(counts), time_line(spent)]))


def _cases(results: Sequence[CaseResult]) -> Collection[CaseResult]:
    """Each case once, as exports have it: by the worst of its verdicts where several tests asked for it."""
    cases: dict[tuple[str, str], CaseResult] = {}
    for result in sorted(results, key=lambda result: [*VERDICTS, result.verdict].index(result.verdict)):
        cases.setdefault((result.id, result.digest), result)
    return cases.values()


def _hint(results: Sequence[CaseResult]) -> list[str]:
    cases = list(_cases(results))
    lines = [result.reason for result in cases if result.reason.startswith(NOT_RECORDED)]
    new = sum(result.verdict == "new" and not result.updated for result in cases) - len(lines)
    if changed := sum(map(_passes_changed, cases)):
        subject, them = (
            ("1 case that is changed passes", "it") if changed == 1 else (f"{changed} that are changed pass", "them")
        )
        lines.append(f"{subject}: --perf-strict fails {them}")
    if new:
        subject, them = ("1 case has", "it") if new == 1 else (f"{new} cases have", "them")
        is_static = any(result.check("predicted_peak_bytes") for result in results)
        what, static = ("static figures", "--perf-static ") if is_static else ("baseline", "")
        lines.append(f"{subject} no {what} yet; record {them} with {static}--update-baselines=new")
    return lines


def _passes_changed(result: CaseResult) -> bool:
    """Whether that is to be said: on a CPU a line of its own does."""
    rate = result.check(RATE)
    is_so = result.verdict == "changed" or (bool(result.changed) and result.verdict in ("pass", "improved"))
    return is_so and not result.updated and not (rate and rate.times_slower)


# Where the time of a run went, in a line.

#: What phases are called where a whole run is told of; several may be one thing to whoever waits.
_OF_A_RUN = shipped(__file__, "phases.ini")["run"]

_NEGLIGIBLE = 0.01


def time_parts(phases: Mapping[str, float]) -> dict[str, float]:
    """Seconds by what they went to, as told of a whole run; the largest part first."""
    parts: dict[str, float] = {}
    for phase, seconds in phases.items():
        name = _OF_A_RUN.get(phase, phase)
        parts[name] = parts.get(name, 0.0) + max(0.0, seconds)
    least = _NEGLIGIBLE * sum(parts.values())
    told = [(seconds, name) for name, seconds in parts.items() if seconds > 0 and seconds >= least]
    return {name: seconds for seconds, name in sorted(told, key=lambda part: -part[0])}


def time_line(spent: Spent) -> str:
    """``364 s in 12 launches: 240 s start-up, 105 s training, 19 s waiting for hardware``; the largest part first.
    Without its parts where nothing is known of them; empty where nothing was launched."""
    if not spent.launches:
        return ""
    line = f"{formats.seconds(spent.seconds)} in {spent.launches} {'launch' if spent.launches == 1 else 'launches'}"
    told = time_parts(spent.phases)
    if not {*told} - {_OF_A_RUN[OTHER]}:
        return line
    return f"{line}: {', '.join(f'{formats.seconds(seconds)} {name}' for name, seconds in told.items())}"
