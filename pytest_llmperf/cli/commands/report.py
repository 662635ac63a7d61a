"""``llmperf report``: what is stored as the chapter's tables, and runs that are over as a page."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pytest_llmperf.analysis import ladder as chapter15
from pytest_llmperf.analysis.ladder import Gain, Rung, Width, gains, largest_jump, step_before
from pytest_llmperf.cli.answer import Answer, CaseError, Screen, plain, table
from pytest_llmperf.cli.arguments import add_place, add_shared
from pytest_llmperf.cli.baseline_folder import Shelf, figure, settings_differences
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.records.metrics import MEMORY, RATE
from pytest_llmperf.records.results_document import ResultsError, read_values
from pytest_llmperf.report.page.html_page import missing
from pytest_llmperf.report.run_document import RunDocument
from pytest_llmperf.report.table import Column, escaped, markdown
from pytest_llmperf.run.reading import usual_history
from pytest_llmperf.run.run_page.written_page import write_page
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import formats
from pytest_llmperf.support.version import MADE_BY


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of ``llmperf report``."""
    add_place(parser)
    parser.add_argument("results", metavar="RESULTS", type=Path, nargs="*", help="--perf-json files, for --html")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tables", action="store_true", help="tables 15.1 to 15.9, and 15.10 to 15.12 of several GPUs")
    what.add_argument("--html", metavar="FILE", type=Path, help="the runs of RESULTS as one page that needs no network")
    add_shared(parser, "report")
    parser.set_defaults(answer=_answer, usage=parser.error)


def _answer(arguments: argparse.Namespace, screen: Screen) -> Answer:
    path, results = arguments.html, arguments.results
    if path and not results:
        arguments.usage("--html needs RESULTS: the --perf-json files of the runs")
    if results and not path:
        arguments.usage(f"{results[0]} says nothing to --tables: RESULTS go with --html FILE")
    if path and arguments.machine:
        arguments.usage("--machine says nothing to --html")
    if path:
        said = arguments.perf_history
        history = usual_history() if said is None else None if said == "off" else Path(said)
        return _written(path, results, arguments.perf_baselines, history)
    shelf = Shelf.read(arguments.perf_baselines, arguments.machine)
    try:
        machine, found = ladders(shelf)
    except CaseError as error:
        return Answer([], [*shelf.troubles, str(error)])
    if arguments.format == "markdown":
        return Answer(markdown_page(machine, found, scalings(shelf)), shelf.troubles, for_programs=True)
    return Answer(text_page(machine, found, screen, scalings(shelf)), shelf.troubles)


# ``llmperf report RESULTS… --html FILE``: runs that are over, as the page that ``--perf-report`` writes.


def _written(path: Path, results: Sequence[Path], baselines: Path, history: Path | None) -> Answer:
    """What was written to ``path``, and a line for each of ``results`` that is not in it."""
    if why := missing():
        return Answer([], [f"--html {path}: {why}"])
    found, troubles = list[tuple[str, Any]](), list[str]()
    for file in results:
        try:
            found.append((file.name, read_values(file)))
        except ResultsError as error:
            troubles.append(str(error))
    if not found:
        return Answer([], [*troubles, f"{path}: no page was written, there is nothing to show"])
    names, runs = [name for name, _ in found], list[RunDocument]()
    for number, (name, document) in enumerate(found, 1):
        numbered = name if names.count(name) == 1 else f"{name} ({number})"
        runs.append(RunDocument(document, numbered if len(found) > 1 else ""))
    page = write_page(path, runs, baselines, troubles, made_by=MADE_BY, history=history)
    if page.why_none:
        return Answer([], [*troubles, page.why_none])
    cases = sum(len(run.results) for run in runs)
    of_runs = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    return Answer([f"{path}: {cases} case{'s' * (cases != 1)} of {of_runs}"], [*troubles, *page.without])


# ``--tables``: a machine's baselines as the chapter's tables, beside the published figures. Pure.

_TITLE = "chapter 15"
_NOTES_OF_SEVERAL_GPUS = (
    "15.10 to 15.12: every GPU has the same batch at every width; efficiency: speed-up over GPUs",
    "cost efficiency: tokens/s per euro against one GPU, every GPU-hour at one price: the chapter's normalised proxy",
)


@dataclass(frozen=True)
class Side:
    """One rung's figures, ours or the published ones; ``None`` where there are none."""

    rate: float | None
    memory_bytes: float | None
    gain: Gain
    is_largest_jump: bool


_Side = TypeVar("_Side", Side, Width)


@dataclass(frozen=True)
class Row(Generic[_Side]):
    rung: Rung
    ours: _Side
    published: _Side


Ladder = Sequence[Row[Side]]


@dataclass(frozen=True)
class Scaling:
    """One model at the chapter's widths."""

    parallelism: str
    rows: Sequence[Row[Width]]


def ladders(shelf: Shelf) -> tuple[str, list[Ladder]]:
    """The one machine kind of ``shelf``, and the chapter's ladders that it has a rung of; CaseError: it has neither."""
    machines = sorted({one.baseline.machine for one in shelf.stored})
    if len(machines) > 1:
        raise CaseError(
            f"{shelf.root}: baselines of {len(machines)} machine kinds, expected one; "
            f"choose with --machine: {', '.join(map(plain, machines))}"
        )
    baselines = {one.baseline.digest: one.baseline for one in shelf.stored}
    known = [rungs for rungs in chapter15.LADDERS if any(rung.spec.digest in baselines for rung in rungs)]
    if not known and not scalings(shelf):
        raise CaseError(
            f"{shelf.root}: none of {len(baselines)} baselines is of a rung of {_TITLE}, expected one at least; "
            "record them with: pytest perf_tests/test_ladder.py --gpus 1 --update-baselines=new"
        )
    return machines[0], [_ladder(rungs, baselines) for rungs in known]


def _ladder(rungs: Sequence[Rung], baselines: Mapping[str, Baseline]) -> Ladder:
    stored = [baselines.get(rung.spec.digest) for rung in rungs]
    figures = {name: [None if one is None else figure(one, name) for one in stored] for name in (RATE, MEMORY)}
    ours = _sides(rungs, figures[RATE], figures[MEMORY])
    memory = [rung.reference.peak_reserved_bytes if rung.reference else None for rung in rungs]
    published = _sides(rungs, [rung.published_rate for rung in rungs], memory)
    return [Row(rung, mine, theirs) for rung, mine, theirs in zip(rungs, ours, published, strict=True)]


def _sides(rungs: Sequence[Rung], rates: Sequence[float | None], memory: Sequence[float | None]) -> list[Side]:
    found = gains(rungs, rates)
    largest = largest_jump(rungs, found)
    both = enumerate(zip(rates, memory, found, strict=True))
    return [Side(rate, num_bytes, gain, index == largest) for index, (rate, num_bytes, gain) in both]


def scalings(shelf: Shelf) -> list[Scaling]:
    """The chapter's widths with the baselines of ``shelf``, of one machine kind; none where only one GPU is stored."""
    found = []
    for rungs in chapter15.SCALINGS:
        stored = _of_this_work(rungs[0].spec, [one.baseline for one in shelf.stored])
        for parallelism in dict.fromkeys(spec.parallelism for spec in stored if spec.gpus > 1):
            # One GPU has nothing to share: its figure serves every parallelism.
            ours = {spec.gpus: one for spec, one in stored.items() if spec.parallelism == parallelism or spec.gpus == 1}
            rates, memory = ({gpus: figure(one, name) for gpus, one in ours.items()} for name in (RATE, MEMORY))
            rows = []
            for rung in rungs:
                gpus, reference = rung.spec.gpus, rung.reference
                mine = Width(gpus, rates.get(gpus), rates.get(1), memory.get(gpus))
                theirs = reference.peak_reserved_bytes if reference else None
                rows.append(Row(rung, mine, Width(gpus, rung.published_rate, rungs[0].published_rate, theirs)))
            found.append(Scaling(parallelism, rows))
    return found


def _of_this_work(of_one: TrainSpec, baselines: Iterable[Baseline]) -> Mapping[TrainSpec, Baseline]:
    found = {}
    for baseline in baselines:
        try:
            spec = TrainSpec.from_dict(baseline.spec)
            same = replace(spec, gpus=1, parallelism=of_one.parallelism).digest == of_one.digest
        except (TypeError, ValueError):
            continue
        # A baseline of capacity has the digest of a search.
        if same and spec.digest == baseline.digest:
            found[spec] = baseline
    return found


def text_page(machine: str, found: Sequence[Ladder], screen: Screen, scaled: Sequence[Scaling] = ()) -> list[str]:
    """For a terminal: one table a model, or two where it is too narrow; and three for several GPUs."""
    lines = [_heading(machine)]
    for ladder in found:
        lines += ["", _subject(ladder)]
        whole = table(_ladder_columns(ladder), Screen(None, screen.glyphs))
        if screen.width is None or max(map(len, whole)) <= screen.width:
            lines += whole
        else:
            # The settings in one column, as ids say them.
            specs = [row.rung.spec for row in ladder]
            names = [one.id.removeprefix(f"{one.architecture.slug}-").removesuffix(f"-gpus{one.gpus}") for one in specs]
            short = [f"{row.rung.number} {name}" for row, name in zip(ladder, names, strict=True)]
            rung = Column("rung", short, right=False)
            lines += [*table([rung, *_speed(ladder)], screen), "", *table([rung, *_memory(ladder)], screen)]
        lines += _jumps(ladder)
    for scaling in scaled:
        lines += ["", _scaling_subject(scaling)]
        for name, columns in _scaling_tables(scaling).items():
            lines += ["", name, *table(columns, screen)]
    return [*lines, "", *_notes(scaled)]


def markdown_page(machine: str, found: Sequence[Ladder], scaled: Sequence[Scaling] = ()) -> list[str]:
    """For a document."""
    lines = [f"## {escaped(_heading(machine))}"]
    for ladder in found:
        lines += ["", f"### {escaped(_subject(ladder))}", "", *markdown(_ladder_columns(ladder)), ""]
        lines += [f"- {escaped(line)}" for line in _jumps(ladder)]
    for scaling in scaled:
        lines += ["", f"### {escaped(_scaling_subject(scaling))}"]
        for name, columns in _scaling_tables(scaling).items():
            lines += ["", f"#### {escaped(name)}", "", *markdown(columns)]
    return [*lines, "", *(f"- {escaped(line)}" for line in _notes(scaled))]


def _heading(machine: str) -> str:
    return f"{plain(machine)} beside {_TITLE}"


def _notes(scaled: Sequence[Scaling]) -> list[str]:
    return [*chapter15.NOTES, *(_NOTES_OF_SEVERAL_GPUS if scaled else ())]


def _subject(ladder: Ladder) -> str:
    """The model, what all of its rungs share, and whose figures stand beside ours."""
    spec, gpus = ladder[0].rung.spec, "1 GPU" if ladder[0].rung.spec.gpus == 1 else f"{ladder[0].rung.spec.gpus} GPUs"
    shared = f"{spec.model}, {gpus}, {spec.sequence_length} tokens, {spec.optimizer}"
    return f"{shared}; published: {_sources(ladder)}"


def _sources(rows: Sequence[Row[Any]]) -> str:
    return "; ".join(dict.fromkeys(row.rung.reference.source for row in rows if row.rung.reference))


def _ladder_columns(ladder: Ladder) -> list[Column]:
    specs = [row.rung.spec for row in ladder]
    return [
        Column("table", [row.rung.number for row in ladder], right=False),
        Column("batch", [str(spec.micro_batch_size) for spec in specs]),
        Column("weights", [spec.model_precision for spec in specs], right=False),
        Column("mixed", [spec.mixed_precision for spec in specs], right=False),
        Column("attention", [spec.attention for spec in specs], right=False),
        Column("Liger", ["yes" if spec.liger else "no" for spec in specs], right=False),
        *_speed(ladder),
        *_memory(ladder),
    ]


def _speed(ladder: Ladder) -> list[Column]:
    return [
        *_pair(ladder, "tokens/s/GPU", lambda side: formats.tokens_per_second(side.rate), "OOM"),
        *_pair(ladder, "speed-up", lambda side: _times(side.gain.over_previous)),
        *_pair(ladder, f"over {ladder[0].rung.number}", lambda side: _times(side.gain.over_first)),
    ]


def _memory(ladder: Ladder) -> list[Column]:
    return _pair(ladder, "memory", lambda side: formats.memory(side.memory_bytes), "OOM")


def _pair(
    rows: Sequence[Row[_Side]], heading: str, shown: Callable[[_Side], str], failed: str = formats.ABSENT
) -> list[Column]:
    """A column of ours, and the published one; ``failed`` stands where the publication ran out of memory."""
    published = [failed if row.rung.ran_out_of_memory else shown(row.published) for row in rows]
    return [Column(heading, [shown(row.ours) for row in rows]), Column("published", published)]


def _times(ratio: float | None) -> str:
    return formats.ABSENT if ratio is None else f"{ratio:.2f}"


def _jumps(ladder: Ladder) -> list[str]:
    """Which rung brought most, here and as published."""
    lines, rungs = [], [row.rung for row in ladder]
    for whose, sides in (("", [row.ours for row in ladder]), (", published", [row.published for row in ladder])):
        index = next((index for index, side in enumerate(sides) if side.is_largest_jump), None)
        if index is None:
            lines.append(f"largest jump{whose}: not known, of no two steps in a row are there figures")
            continue
        after, before = rungs[index], step_before(rungs, index)
        lines.append(f"largest jump{whose}: {after.number}, {_times(sides[index].gain.over_previous)} times ")
        if before is not None:
            changed = ", ".join(settings_differences(before.spec.to_dict(), after.spec.to_dict()))
            lines[-1] += f"{before.number} ({changed})"
    absent = sum(row.ours.rate is None for row in ladder)
    return [*lines, f"{absent} of {len(ladder)} rungs have no baseline here"] if absent else lines


def _scaling_subject(scaling: Scaling) -> str:
    """Which training, and whose figures stand beside ours."""
    spec = scaling.rows[0].rung.spec
    name = plain(spec.id.removesuffix(f"-gpus{spec.gpus}"))
    return f"{name}, {plain(scaling.parallelism)}, 1 to 32 GPUs; published (ddp): {_sources(scaling.rows)}"


def _scaling_tables(scaling: Scaling) -> Mapping[str, list[Column]]:
    rows = scaling.rows
    gpus = Column("GPUs", [str(row.rung.spec.gpus) for row in rows])
    batch = Column("global batch", [str(row.rung.spec.sequences_per_step) for row in rows])
    rate = _pair(rows, "tokens/s/GPU", lambda one: formats.tokens_per_second(one.rate))
    total = _pair(rows, "tokens/s", lambda one: formats.tokens_per_second(one.tokens_per_second))
    memory = _pair(rows, "memory", lambda one: formats.memory(one.memory_bytes))
    speed_up = _pair(rows, "speed-up", lambda one: _times(one.speed_up))
    efficiency = _pair(rows, "efficiency", lambda one: formats.share(one.efficiency))
    cost = _pair(rows, "cost efficiency", lambda one: _times(one.efficiency))
    return {
        "15.10 throughput and memory": [gpus, batch, *rate, *memory],
        "15.11 speed-up and efficiency": [gpus, *rate, *total, *speed_up, *efficiency],
        "15.12 cost efficiency": [gpus, *total, *efficiency, *cost],
    }
