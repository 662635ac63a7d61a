"""The end of a run: one table of the cases as they ran, what was recorded, the totals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from pytest_llmperf.records.result import VERDICTS, CaseResult, Spent
from pytest_llmperf.report.failure_message import explained
from pytest_llmperf.report.merged_notes import merged_notes, of_cases
from pytest_llmperf.report.table import Column, render
from pytest_llmperf.report.text import Glyphs, fold, glyphs_of, one_line
from pytest_llmperf.report.time_spent import time_line
from pytest_llmperf.support import formats

# A failing case has said why in its own message.
_EXPLAINED = frozenset({"pass", "regressed", "invalid", "new"})
# Less than that is how long any loader takes.
_LEAST_DATA_WAIT = 0.05
_MOST_SOURCES, _MOST_LINES = 3, 8


def summary_lines(
    results: Sequence[CaseResult],
    width: int | None,
    color: bool,
    encoding: str | None = "utf-8",
    spent: Spent | None = None,
) -> list[str]:
    """The table of ``results`` and what belongs below it: among it what the run ``spent``, on launches that failed too.

    ``width`` is the terminal's, ``None`` where there is none: then nothing is folded. Whatever the width, no id and no
    figure is cut. ``encoding`` is the output's: what it cannot show is written in ASCII.
    """
    if not results:
        return list(filter(None, [time_line(spent or Spent())]))
    glyphs = glyphs_of(encoding)
    stored = [result for result in results if not result.launches_before]
    in_turns = [result for result in results if result.launches_before]
    below = [
        *_sources(results),
        *(
            f"{result.id}: {result.verdict}: {explained(result, result.reason)}"
            for result in results
            if result.verdict not in _EXPLAINED
        ),
        *_grouped("changed since the baseline", stored, lambda result: result.changed),
        *_grouped("not the same on both sides", in_turns, lambda result: result.changed),
        *_grouped("different from the baseline's environment", stored, lambda result: result.differences),
        *_grouped("different between the two sides", in_turns, lambda result: result.differences),
        *merged_notes((result.id, result.notes) for result in results),
        # Two tests of one training recorded it once.
        *(line for recorded in dict.fromkeys(map(_recorded, results)) for line in recorded),
        _totals(results, spent or Spent(), glyphs),
        *_hint(results),
    ]
    lines = render(_columns(results, glyphs, encoding), width, color, glyphs)
    for line in below:
        # An update's own lines are aligned: their indent stays.
        margin = line[: len(line) - len(line.lstrip(" "))]
        lines += fold(margin + one_line(line, encoding), width, indent=margin + "  ")
    return lines


def _columns(results: Sequence[CaseResult], glyphs: Glyphs, encoding: str | None) -> list[Column]:
    """The columns that have something to show; the case and its verdict always have."""

    def cells(metric: str) -> list[str]:
        return [_cell(result, metric) for result in results]

    def changes(metric: str) -> list[str]:
        return [formats.percent(check.change if (check := result.check(metric)) else None) for result in results]

    columns = [
        Column("case", [one_line(result.id, encoding) or formats.ABSENT for result in results], right=False),
        Column("tokens/s/GPU", cells("tokens_per_second_per_gpu")),
        Column("change", changes("tokens_per_second_per_gpu")),
        Column("detectable", [_detectable(result) for result in results]),
        Column("memory", cells("peak_reserved_bytes")),
        Column("change", changes("peak_reserved_bytes")),
        Column("MFU", cells("mfu")),
        Column("efficiency", cells("scaling_efficiency")),
        Column("real tokens", cells("real_tokens_per_second_per_gpu")),
        Column("communication", cells("communication_share")),
        Column("waits for data", [_data_waits(result) for result in results]),
        Column("operators", [_operators(result) for result in results]),
        Column("arithmetic", cells("flops_per_step")),
        Column("predicted", cells("predicted_peak_bytes")),
        Column("energy", cells("joules_per_token")),
        Column("a million tokens", cells("price_per_million_tokens")),
        Column(
            "verdict",
            [one_line(_outcome(result), encoding) or formats.ABSENT for result in results],
            right=False,
            colored=True,
        ),
        Column("reference", [one_line(_reference(result, glyphs), encoding) for result in results], right=False),
    ]
    kept = ("case", "verdict")
    return [c for c in columns if c.heading in kept or any(cell != formats.ABSENT for cell in c.cells)]


def _outcome(result: CaseResult) -> str:
    """The verdict, what is not as it was, and what an update made of it: ``pass, changed, recorded``."""
    words = [
        result.verdict,
        "changed" if result.changed and result.verdict != "changed" else "",
        "recorded" if result.updated else "",
    ]
    return ", ".join(word for word in words if word)


def _data_waits(result: CaseResult) -> str:
    """The share of a step, where it can be seen at all."""
    check = result.check("data_wait_share")
    return formats.ABSENT if check is None or check.value < _LEAST_DATA_WAIT else formats.share(check.value)


def _detectable(result: CaseResult) -> str:
    """The smallest slow-down that this case would have told; not where speed is no gate, which a line below says."""
    check = result.check("tokens_per_second_per_gpu")
    return formats.share(check.detectable) if check is not None and not check.is_wide else formats.ABSENT


def _operators(result: CaseResult) -> str:
    """Of a step that was told without a launch; of one that was traced its kernels are told where they moved."""
    return _cell(result, "operators_per_step") if result.check("predicted_peak_bytes") else formats.ABSENT


def _cell(result: CaseResult, metric: str) -> str:
    check = result.check(metric)
    if check is None:
        return formats.ABSENT
    return formats.memory(check.value) if check.unit == "bytes" else formats.figure(metric, check.value, check.unit)


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
    cases: dict[str, list[str]] = {}
    for result in results:
        for line in lines_of(result):
            cases.setdefault(line, []).append(result.id)
    lines = [f"{title}: {line} ({of_cases(ids, len(results))})" for line, ids in cases.items()]
    return lines[:_MOST_LINES] + ([f"{title}: {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else [])


def _recorded(result: CaseResult) -> tuple[str, ...]:
    lines = tuple(line.rstrip() for line in result.updated.splitlines() if line.strip())
    if not lines or result.id in lines[0]:
        return lines
    return (f"recorded {result.id}", *(f"  {line}" for line in lines))


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
    new = sum(result.verdict == "new" and not result.updated for result in _cases(results))
    if not new:
        return []
    subject, them = ("1 case has", "it") if new == 1 else (f"{new} cases have", "them")
    is_static = any(result.check("predicted_peak_bytes") for result in results)
    what, static = ("static figures", "--perf-static ") if is_static else ("baseline", "")
    return [f"{subject} no {what} yet; record {them} with {static}--update-baselines=new"]
