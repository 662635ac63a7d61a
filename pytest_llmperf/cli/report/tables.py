"""``report --tables`` of several GPUs: tables 15.10 to 15.12, baselines beside the published figures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_llmperf.analysis import ladder
from pytest_llmperf.analysis.ladder import Rung, Width
from pytest_llmperf.cli.baseline_folder import Shelf, figure
from pytest_llmperf.cli.screen import Screen, plain, table
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.records.metrics import MEMORY, RATE
from pytest_llmperf.report.table import Column, escaped, markdown
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import formats

NOTES = (
    "15.10 to 15.12: every GPU has the same batch at every width; efficiency: speed-up over GPUs",
    "cost efficiency: tokens/s per euro against one GPU, every GPU-hour at one price: the chapter's normalised proxy",
)


@dataclass(frozen=True)
class Row:
    rung: Rung
    ours: Width
    published: Width


@dataclass(frozen=True)
class Scaling:
    """One model at the chapter's widths."""

    parallelism: str
    rows: Sequence[Row]


def scalings(shelf: Shelf) -> list[Scaling]:
    """The chapter's widths with the baselines of ``shelf``, of one machine kind; none where only one GPU is stored."""
    found = []
    for rungs in ladder.SCALINGS:
        of_one = rungs[0].spec
        stored = _of_this_work(of_one, [one.baseline for one in shelf.stored])
        for parallelism in dict.fromkeys(spec.parallelism for spec in stored if spec.gpus > 1):
            # One GPU has nothing to share: its figure serves every parallelism.
            ours = {spec.gpus: one for spec, one in stored.items() if spec.parallelism == parallelism or spec.gpus == 1}
            found.append(Scaling(parallelism, _rows(rungs, ours)))
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


def _rows(rungs: Sequence[Rung], ours: Mapping[int, Baseline]) -> list[Row]:
    rates = {gpus: figure(one, RATE) for gpus, one in ours.items()}
    memory = {gpus: figure(one, MEMORY) for gpus, one in ours.items()}
    published_of_one = rungs[0].published_rate
    rows = []
    for rung in rungs:
        gpus, reference = rung.spec.gpus, rung.reference
        published_memory = reference.peak_reserved_bytes if reference else None
        rows.append(
            Row(
                rung,
                Width(gpus, rates.get(gpus), rates.get(1), memory.get(gpus)),
                Width(gpus, rung.published_rate, published_of_one, published_memory),
            )
        )
    return rows


def text_lines(found: Sequence[Scaling], screen: Screen) -> list[str]:
    """For a terminal."""
    lines = []
    for scaling in found:
        lines += ["", _subject(scaling)]
        for name, columns in _tables(scaling).items():
            lines += ["", name, *table(columns, screen)]
    return lines


def markdown_lines(found: Sequence[Scaling]) -> list[str]:
    """For a document."""
    lines = []
    for scaling in found:
        lines += ["", f"### {escaped(_subject(scaling))}"]
        for name, columns in _tables(scaling).items():
            lines += ["", f"#### {escaped(name)}", "", *markdown(columns)]
    return lines


def _subject(scaling: Scaling) -> str:
    """Which training, and whose figures stand beside ours."""
    spec = scaling.rows[0].rung.spec
    sources = dict.fromkeys(row.rung.reference.source for row in scaling.rows if row.rung.reference)
    name = spec.id.removesuffix(f"-gpus{spec.gpus}")
    return f"{plain(name)}, {plain(scaling.parallelism)}, 1 to 32 GPUs; published (ddp): {'; '.join(sources)}"


def _tables(scaling: Scaling) -> Mapping[str, list[Column]]:
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


def _pair(rows: Sequence[Row], heading: str, shown: Callable[[Width], str]) -> list[Column]:
    return [
        Column(heading, [shown(row.ours) for row in rows]),
        Column("published", [shown(row.published) for row in rows]),
    ]


def _times(ratio: float | None) -> str:
    return formats.ABSENT if ratio is None else f"{ratio:.2f}"
