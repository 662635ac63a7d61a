"""``llmperf report``: what is stored as the chapter's tables, and runs that are over as a page."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Generic, TypeVar

from pytest_llmperf.analysis.ladder import LADDERS, NOTES, SCALINGS, Gain, Rung, Width, gains
from pytest_llmperf.cli.answer import Answer, CaseError, Screen, add_option, add_place, add_shared, plain, table
from pytest_llmperf.cli.baseline_folder import Shelf, figure
from pytest_llmperf.records.metrics import MEMORY, RATE
from pytest_llmperf.records.results_document import ResultsError, read_values
from pytest_llmperf.report.page import missing
from pytest_llmperf.report.results_json import RunDocument
from pytest_llmperf.report.text import Column, escaped, markdown
from pytest_llmperf.run.reading import usual_history
from pytest_llmperf.run.run_page import write_page
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import formats


def add_options(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    parser.add_argument("results", metavar="RESULTS", type=Path, nargs="*")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--tables", action="store_true")
    what.add_argument("--html", metavar="FILE", type=Path)
    add_shared(parser, "report")
    add_option(parser, "--format", default="text")
    parser.set_defaults(answer=_answer, usage=parser.error)


def _answer(arguments: argparse.Namespace, screen: Screen) -> Answer:
    path, results = arguments.html, arguments.results
    if path and not results:
        arguments.usage("--html needs RESULTS: the --perf-json files of the runs")
    if results and not path:
        arguments.usage(f"{results[0]}: results of runs go on a page, which --html FILE names; tables are of baselines")
    if path and arguments.machine:
        arguments.usage("--machine says nothing to --html")
    if path:
        said = arguments.perf_history
        history = usual_history() if said is None else None if said == "off" else Path(said)
        return _written(path, results, arguments.perf_baselines, history)
    shelf = Shelf.read(arguments.perf_baselines, arguments.machine)
    is_text, machines = arguments.format == "text", sorted({one.baseline.machine for one in shelf.stored})
    where = screen if is_text else None
    try:
        if len(machines) > 1:
            lines = side_by_side(shelf, machines, where)
        else:
            lines = page(machines[0] if machines else "", ladders(shelf), scalings(shelf), where)
    except CaseError as error:
        return Answer([], [*shelf.troubles, str(error)])
    return Answer(lines, shelf.troubles, for_programs=not is_text)


# ``llmperf report RESULTS… --html FILE``: runs that are over, as the page that ``--perf-report`` writes.
def _written(path: Path, results: Sequence[Path], baselines: Path, history: Path | None) -> Answer:
    """What was written to ``path``, and a line for each of ``results`` that is not in it."""
    if not path.parent.is_dir():
        return Answer([], [f"--html {path}: there is no folder {path.parent}; make it, or name another"])
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
    why_none, without = write_page(path, runs, baselines, history, troubles)
    if why_none:
        return Answer([], [*troubles, why_none])
    cases = sum(len(run.results) for run in runs)
    told = f"{path}: {cases} case{'s' * (cases != 1)} of {len(runs)} run{'s' * (len(runs) != 1)}"
    return Answer([told], [*troubles, *without])


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


_Side = TypeVar("_Side", Side, Width)


@dataclass(frozen=True)
class Rungs(Generic[_Side]):
    """A table of the chapter: figures of ours and the published ones, in the order of its rungs."""

    rungs: Sequence[Rung]
    ours: Sequence[_Side]
    published: Sequence[_Side]
    parallelism: str = ""
    """Of several GPUs."""

    @property
    def source(self) -> str:
        return "; ".join(dict.fromkeys(rung.reference.source for rung in self.rungs if rung.reference))

    def pair(self, heading: str, shown: Callable[[_Side], str], failed: str = formats.ABSENT) -> list[Column]:
        """A column of ours, and the published one; ``failed`` stands where the publication ran out of memory."""
        both = zip(self.rungs, self.published, strict=True)
        published = [failed if rung.ran_out_of_memory else shown(side) for rung, side in both]
        return [Column(heading, [shown(side) for side in self.ours]), Column("published", published)]


def ladders(shelf: Shelf) -> list[Rungs[Side]]:
    """The chapter's ladders that ``shelf``, of one machine kind, has a rung of; CaseError: it has nothing to show."""
    baselines = {one.baseline.digest: one.baseline for one in shelf.stored}
    known = [rungs for rungs in LADDERS if any(rung.spec.digest in baselines for rung in rungs)]
    if not known and not scalings(shelf):
        raise CaseError(
            f"{shelf.root}: none of {len(baselines)} baselines is of a rung of {_TITLE}, expected one at least; "
            "record them with: pytest perf_tests/test_ladder.py --gpus 1 --update-baselines=new"
        )
    found = []
    for rungs in known:
        stored = [baselines.get(rung.spec.digest) for rung in rungs]
        rates, memory = ([None if one is None else figure(one, name) for one in stored] for name in (RATE, MEMORY))
        published = [rung.reference.peak_reserved_bytes if rung.reference else None for rung in rungs]
        theirs = _sides(rungs, [rung.published_rate for rung in rungs], published)
        found.append(Rungs(rungs, _sides(rungs, rates, memory), theirs))
    return found


def _sides(rungs: Sequence[Rung], rates: Sequence[float | None], memory: Sequence[float | None]) -> list[Side]:
    return [Side(*each) for each in zip(rates, memory, gains(rungs, rates), strict=True)]


def scalings(shelf: Shelf) -> list[Rungs[Width]]:
    """The chapter's widths with the baselines of ``shelf``, of one machine kind; none where only one GPU is stored."""
    found = []
    for rungs in SCALINGS:
        every = (one.baseline for one in shelf.stored)
        stored = {spec: one for one in every if (spec := _of_this_work(rungs[0].spec, one.digest, one.spec))}
        for parallelism in dict.fromkeys(spec.parallelism for spec in stored if spec.gpus > 1):
            # One GPU has nothing to share: its figure serves every parallelism.
            ours = {spec.gpus: one for spec, one in stored.items() if spec.parallelism == parallelism or spec.gpus == 1}
            rates, memory = ({gpus: figure(one, name) for gpus, one in ours.items()} for name in (RATE, MEMORY))
            widths, published = [], []
            for rung in rungs:
                gpus, reference = rung.spec.gpus, rung.reference
                widths.append(Width(gpus, rates.get(gpus), rates.get(1), memory.get(gpus)))
                theirs = reference.peak_reserved_bytes if reference else None
                published.append(Width(gpus, rung.published_rate, rungs[0].published_rate, theirs))
            found.append(Rungs(rungs, widths, published, parallelism))
    return found


def _of_this_work(of_one: TrainSpec, digest: str, stored: Mapping[str, Any]) -> TrainSpec | None:
    """What is ``stored`` under ``digest``, where it is ``of_one`` on however many GPUs."""
    try:
        spec = TrainSpec.from_dict(stored)
        same = replace(spec, gpus=1, parallelism=of_one.parallelism).digest == of_one.digest
    except (TypeError, ValueError):
        return None
    # A baseline of capacity has the digest of a search.
    return spec if same and spec.digest == digest else None


def page(
    machine: str, found: Sequence[Rungs[Side]], scaled: Sequence[Rungs[Width]], screen: Screen | None = None
) -> list[str]:
    """One table a model, three for several GPUs: for a ``screen``, or as Markdown."""

    def title(level: int, text: str) -> str:
        return f"{'#' * level} {escaped(text)}" if screen is None else text

    def shown(columns: Sequence[Column]) -> list[str]:
        return ["", *markdown(columns)] if screen is None else table(columns, screen)

    def listed(lines: Sequence[str]) -> list[str]:
        return ["", *(f"- {escaped(line)}" for line in lines)] if screen is None else [*lines]

    lines = [title(2, f"{plain(machine)} beside {_TITLE}")]
    for ladder in found:
        tables = _for_a_screen(ladder, screen) if screen else shown([*chain(*_ladder_columns(ladder))])
        absent = sum(side.rate is None for side in ladder.ours)
        told = [f"{absent} of {len(ladder.rungs)} rungs have no baseline here"] if absent else []
        lines += ["", title(3, _subject(ladder)), *tables, *(listed(told) if told else [])]
    for scaling in scaled:
        spec = scaling.rungs[0].spec
        case = plain(spec.id.removesuffix(f"-gpus{spec.gpus}"))
        subject = f"{case}, {plain(scaling.parallelism)}, 1 to 32 GPUs; published (ddp): {scaling.source}"
        lines += ["", title(3, subject)]
        for name, columns in _scaling_tables(scaling).items():
            lines += ["", title(4, name), *shown(columns)]
    notes = listed([*NOTES, *(_NOTES_OF_SEVERAL_GPUS if scaled else ())])
    return [*lines, *([""] if screen else []), *notes]


def side_by_side(shelf: Shelf, machines: Sequence[str], screen: Screen | None) -> list[str]:
    """One table a model, with the figures of several machine kinds, by letters; CaseError: there is no ladder."""
    parts = [replace(shelf, every=[one for one in shelf.every if one.baseline.machine == name]) for name in machines]
    letters = dict(zip(map(chr, range(ord("A"), ord("A") + len(machines))), machines, strict=True))
    stored = dict(zip(letters, map(_rungs_by_model, parts), strict=True))
    if not (models := dict.fromkeys(model for by_model in stored.values() for model in by_model)):
        raise CaseError(f"{shelf.root}: no baseline is of a rung of {_TITLE}; choose a machine kind with --machine")
    lines = [f"{letter}: {plain(machine)}" for letter, machine in letters.items()]
    lines = ["", *(f"- {escaped(line)}" for line in lines)] if screen is None else lines
    for model in models:
        known = {letter: by_model[model] for letter, by_model in stored.items() if model in by_model}
        first, ladder = next(iter(known.items()))
        columns, rates = _ladder_columns(ladder)[0], {name: [s.rate for s in one.ours] for name, one in known.items()}
        columns += [
            Column(f"{name} tokens/s/GPU", [*map(formats.tokens_per_second, each)]) for name, each in rates.items()
        ]
        for letter in [*rates][1:]:
            ratios = (a / b if a and b else None for a, b in zip(rates[letter], rates[first], strict=True))
            columns.append(Column(f"{letter} over {first}", [*map(_times, ratios)]))
        columns.append(ladder.pair("", lambda side: formats.tokens_per_second(side.rate), "OOM")[1])
        columns += [
            Column(f"{name} memory", [formats.memory(s.memory_bytes) for s in one.ours]) for name, one in known.items()
        ]
        shown = ["", *markdown(columns)] if screen is None else table(columns, screen)
        lines += ["", ("### " if screen is None else "") + escaped(_subject(ladder)), *shown]
    return lines


def _rungs_by_model(shelf: Shelf) -> dict[str, Rungs[Side]]:
    try:
        return {one.rungs[0].spec.model: one for one in ladders(shelf)}
    except CaseError:
        return {}


def _for_a_screen(ladder: Rungs[Side], screen: Screen) -> list[str]:
    """One table, or two where it is too narrow for one: with the settings in one column, as ids say them."""
    settings, speed, memory = _ladder_columns(ladder)
    whole = table([*settings, *speed, *memory], Screen(None))
    if screen.width is None or max(map(len, whole)) <= screen.width:
        return whole
    specs = [rung.spec for rung in ladder.rungs]
    names = [one.id.removeprefix(f"{one.architecture.slug}-").removesuffix(f"-gpus{one.gpus}") for one in specs]
    short = [f"{rung.number} {name}" for rung, name in zip(ladder.rungs, names, strict=True)]
    first = Column("rung", short, right=False)
    return [*table([first, *speed], screen), "", *table([first, *memory], screen)]


def _subject(ladder: Rungs[Side]) -> str:
    spec = ladder.rungs[0].spec
    shared = f"{spec.model}, {formats.counted(spec.gpus, 'GPU')}, {spec.sequence_length} tokens, {spec.optimizer}"
    return f"{shared}; published: {ladder.source}"


def _ladder_columns(ladder: Rungs[Side]) -> tuple[list[Column], list[Column], list[Column]]:
    specs = [rung.spec for rung in ladder.rungs]
    first = ladder.rungs[0].number
    settings = [
        Column("table", [rung.number for rung in ladder.rungs], right=False),
        Column("batch", [str(spec.micro_batch_size) for spec in specs]),
        Column("weights", [spec.model_precision for spec in specs], right=False),
        Column("mixed", [spec.mixed_precision for spec in specs], right=False),
        Column("attention", [spec.attention for spec in specs], right=False),
        Column("Liger", ["yes" if spec.liger else "no" for spec in specs], right=False),
    ]
    speed = [
        *ladder.pair("tokens/s/GPU", lambda side: formats.tokens_per_second(side.rate), "OOM"),
        *ladder.pair("speed-up", lambda side: _times(side.gain.over_previous)),
        *ladder.pair(f"over {first}", lambda side: _times(side.gain.over_first)),
    ]
    return settings, speed, ladder.pair("memory", lambda side: formats.memory(side.memory_bytes), "OOM")


def _times(ratio: float | None) -> str:
    return formats.ABSENT if ratio is None else f"{ratio:.2f}"


def _scaling_tables(scaling: Rungs[Width]) -> Mapping[str, list[Column]]:
    gpus = Column("GPUs", [str(rung.spec.gpus) for rung in scaling.rungs])
    batch = Column("global batch", [str(rung.spec.sequences_per_step) for rung in scaling.rungs])
    rate = scaling.pair("tokens/s/GPU", lambda one: formats.tokens_per_second(one.rate))
    total = scaling.pair("tokens/s", lambda one: formats.tokens_per_second(one.tokens_per_second))
    memory = scaling.pair("memory", lambda one: formats.memory(one.memory_bytes))
    speed_up = scaling.pair("speed-up", lambda one: _times(one.speed_up))
    efficiency = scaling.pair("efficiency", lambda one: formats.share(one.efficiency))
    cost = scaling.pair("cost efficiency", lambda one: _times(one.efficiency))
    return {
        "15.10 throughput and memory": [gpus, batch, *rate, *memory],
        "15.11 speed-up and efficiency": [gpus, *rate, *total, *speed_up, *efficiency],
        "15.12 cost efficiency": [gpus, *total, *efficiency, *cost],
    }
