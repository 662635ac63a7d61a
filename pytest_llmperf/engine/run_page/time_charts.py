"""Where the run's time went: all launches by phase, and the longest of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_llmperf.engine.run_page.run_document import RunDocument
from pytest_llmperf.records.phases import total
from pytest_llmperf.report.page.page_model import Section, Stack, StackChart, Table
from pytest_llmperf.report.time_spent import parts_of_a_run
from pytest_llmperf.support import formats

_MOST_LAUNCHES = 10


def time_section(documents: Sequence[RunDocument]) -> Section | None:
    """``None`` where nobody told."""
    charts = [chart for chart in (_runs(documents), _longest(documents)) if chart is not None]
    return Section(anchor="time", title="Where the time went", charts=tuple(charts)) if charts else None


def _runs(documents: Sequence[RunDocument]) -> StackChart | None:
    told = [(document, parts_of_a_run(document.spent)) for document in documents if document.spent]
    if not told:
        return None
    rows = [
        (_name(document), name, formats.seconds(seconds), formats.share(seconds / (sum(parts.values()) or 1.0)))
        for document, parts in told
        for name, seconds in sorted(parts.items(), key=lambda part: -part[1])
    ]
    return StackChart(
        title="All launches",
        says="Seconds of all launches together, by what they went to: "
        + "; ".join(f"{name} {seconds}" for _, name, seconds, _ in rows[:4]),
        axis="seconds",
        stacks=tuple(
            Stack(
                f"{_name(document)}: {document.num_launches} launch{'es' * (document.num_launches != 1)}",
                formats.seconds(sum(parts.values())),
                tuple(parts.items()),
            )
            for document, parts in told
        ),
        table=Table(headings=("run", "phase", "time", "share"), rows=tuple(rows), num_words=2),
    )


def _name(document: RunDocument) -> str:
    return document.source or document.machine


def _longest(documents: Sequence[RunDocument]) -> StackChart | None:
    launches = [
        (result.id, launch.phases)
        for document in documents
        for result in document.results
        for launch in (*result.launches_before, *result.launches)
        if launch.phases
    ]
    if not launches:
        return None
    longest = sorted(launches, key=lambda named: -total(named[1]))[:_MOST_LAUNCHES]
    names = list(dict.fromkeys(name for _, phases in longest for name in phases))
    return StackChart(
        title=f"The longest {len(longest)} of {len(launches)} launches",
        says=f"Phases of the longest launches; {longest[0][0]} took {formats.seconds(total(longest[0][1]))}.",
        axis="seconds",
        stacks=tuple(
            Stack(name, formats.seconds(total(phases)), tuple(_worded(phases).items())) for name, phases in longest
        ),
        table=Table(
            headings=("case", *(name.replace("_", " ") for name in names)),
            rows=tuple((name, *(formats.seconds(phases.get(phase)) for phase in names)) for name, phases in longest),
        ),
    )


def _worded(phases: Mapping[str, float]) -> dict[str, float]:
    return {name.replace("_", " "): seconds for name, seconds in phases.items() if seconds > 0}
