"""What ``report --tables`` says: a machine's baselines as the chapter's tables, beside the published figures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pytest_llmperf.cli.baseline_figures import MEMORY, RATE, figure
from pytest_llmperf.cli.baseline_folder import Shelf
from pytest_llmperf.cli.baselines.diff import settings_differences
from pytest_llmperf.cli.command_error import CaseError
from pytest_llmperf.cli.report import scaling_tables
from pytest_llmperf.cli.report.scaling_tables import Scaling
from pytest_llmperf.cli.screen import Screen, plain, table
from pytest_llmperf.insight import chapter15
from pytest_llmperf.insight.ladder import Extent, Gain, Rung, gains, largest_jump, step_before
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.report.exports import comma_separated, escaped, markdown
from pytest_llmperf.report.table import Column
from pytest_llmperf.support import formats
from pytest_llmperf.support.units import GIB

_TITLE = "chapter 15"


@dataclass(frozen=True)
class Side:
    """One rung's figures, ours or the published ones; ``None`` where there are none."""

    rate: float | None
    memory_bytes: float | None
    gain: Gain
    is_largest_jump: bool


@dataclass(frozen=True)
class Row:
    rung: Rung
    ours: Side
    published: Side

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.ours, self.published


Ladder = Sequence[Row]


def ladders(shelf: Shelf) -> tuple[str, list[Ladder]]:
    """The one machine kind of ``shelf``, and the chapter's ladders with its baselines; none that it has no rung of.

    Raises:
        CaseError: several machine kinds, or none of its baselines is of a rung; one line.
    """
    machines = sorted({one.baseline.machine for one in shelf.stored})
    if len(machines) > 1:
        raise CaseError(
            f"{shelf.root}: baselines of {len(machines)} machine kinds, expected one; "
            f"choose with --machine: {', '.join(map(plain, machines))}"
        )
    baselines = {one.baseline.digest: one.baseline for one in shelf.stored}
    known = [rungs for rungs in chapter15.LADDERS if any(rung.spec.digest in baselines for rung in rungs)]
    if not known and not scaling_tables.scalings(shelf):
        raise CaseError(
            f"{shelf.root}: none of {len(baselines)} baselines is of a rung of {_TITLE}, expected one at least; "
            "record them with: pytest perf_tests/test_ladder.py --gpus 1 --update-baselines=new"
        )
    return machines[0], [_ladder(rungs, baselines) for rungs in known]


def _ladder(rungs: Sequence[Rung], baselines: Mapping[str, Baseline]) -> Ladder:
    stored = [baselines.get(rung.spec.digest) for rung in rungs]
    ours = _sides(rungs, [_of(one, RATE) for one in stored], [_of(one, MEMORY) for one in stored])
    published = _sides(
        rungs,
        [rung.published_rate for rung in rungs],
        [rung.reference.peak_reserved_bytes if rung.reference else None for rung in rungs],
    )
    return [Row(rung, mine, theirs) for rung, mine, theirs in zip(rungs, ours, published, strict=True)]


def _of(baseline: Baseline | None, metric: str) -> float | None:
    return None if baseline is None else figure(baseline, metric)


def _sides(rungs: Sequence[Rung], rates: Sequence[float | None], memory: Sequence[float | None]) -> list[Side]:
    found = gains(rungs, rates)
    largest = largest_jump(rungs, found)
    both = enumerate(zip(rates, memory, found, strict=True))
    return [Side(rate, num_bytes, gain, index == largest) for index, (rate, num_bytes, gain) in both]


def text_page(
    machine: str, found: Sequence[Ladder], extent: Extent | None, screen: Screen, scaled: Sequence[Scaling] = ()
) -> list[str]:
    """For a terminal: one table a model, or two where it is too narrow; and three of several GPUs."""
    lines = [_heading(machine)]
    for ladder in found:
        lines += ["", _subject(ladder)]
        whole = table(_settings(ladder) + _speed(ladder) + _rest(ladder, extent), Screen(None, screen.glyphs))
        if screen.width is None or max(map(len, whole)) <= screen.width:
            lines += whole
        else:
            lines += [*table([_short(ladder), *_speed(ladder)], screen), ""]
            lines += table([_short(ladder), *_rest(ladder, extent)], screen)
        lines += _jumps(ladder)
    return [*lines, *scaling_tables.text_lines(scaled, screen), "", *_notes(extent, scaled)]


def markdown_page(
    machine: str, found: Sequence[Ladder], extent: Extent | None, scaled: Sequence[Scaling] = ()
) -> list[str]:
    """For a document."""
    lines = [f"## {escaped(_heading(machine))}"]
    for ladder in found:
        lines += ["", f"### {escaped(_subject(ladder))}", ""]
        lines += markdown(_settings(ladder) + _speed(ladder) + _rest(ladder, extent))
        lines += ["", *(f"- {escaped(line)}" for line in _jumps(ladder))]
    return [
        *lines,
        *scaling_tables.markdown_lines(scaled),
        "",
        *(f"- {escaped(line)}" for line in _notes(extent, scaled)),
    ]


def csv_page(machine: str, found: Sequence[Ladder], extent: Extent | None, scaled: Sequence[Scaling] = ()) -> list[str]:
    """For programs: every rung of every model on a line, in plain numbers."""
    records = [_record(machine, row, extent) for ladder in found for row in ladder]
    if scaled:
        records = [{**record, **scaling_tables.record(None)} for record in records]
        records += [
            {**_record(machine, _alone(row), extent), **scaling_tables.record(row, scaling.parallelism)}
            for scaling in scaled
            for row in scaling.rows
        ]
    return comma_separated(records)


def _alone(row: scaling_tables.Row) -> Row:
    """A width as a rung: there is none before it to gain on."""
    nothing = Gain(None, None)
    return Row(
        row.rung,
        Side(row.ours.rate, row.ours.memory_bytes, nothing, is_largest_jump=False),
        Side(row.published.rate, row.published.memory_bytes, nothing, is_largest_jump=False),
    )


def _heading(machine: str) -> str:
    return f"{plain(machine)} beside {_TITLE}"


def _subject(ladder: Ladder) -> str:
    """The model, what all of its rungs share, and whose figures stand beside ours."""
    spec = ladder[0].rung.spec
    sources = dict.fromkeys(row.rung.reference.source for row in ladder if row.rung.reference)
    gpus = "1 GPU" if spec.gpus == 1 else f"{spec.gpus} GPUs"
    return f"{spec.model}, {gpus}, {spec.sequence_length} tokens, {spec.optimizer}; published: {'; '.join(sources)}"


def _settings(ladder: Ladder) -> list[Column]:
    specs = [row.rung.spec for row in ladder]
    return [
        Column("table", [row.rung.number for row in ladder], right=False),
        Column("batch", [str(spec.micro_batch_size) for spec in specs]),
        Column("weights", [spec.model_precision for spec in specs], right=False),
        Column("mixed", [spec.mixed_precision for spec in specs], right=False),
        Column("attention", [spec.attention for spec in specs], right=False),
        Column("Liger", ["yes" if spec.liger else "no" for spec in specs], right=False),
    ]


def _short(ladder: Ladder) -> Column:
    """The same in one column, as ids say it."""
    specs = [row.rung.spec for row in ladder]
    names = [spec.id.removeprefix(f"{spec.architecture.slug}-").removesuffix(f"-gpus{spec.gpus}") for spec in specs]
    return Column("rung", [f"{row.rung.number} {name}" for row, name in zip(ladder, names, strict=True)], right=False)


def _speed(ladder: Ladder) -> list[Column]:
    return [
        *_pair(ladder, "tokens/s/GPU", lambda _, side: formats.tokens_per_second(side.rate), "OOM"),
        *_pair(ladder, "speed-up", lambda _, side: _times(side.gain.over_previous)),
        *_pair(ladder, f"over {ladder[0].rung.number}", lambda _, side: _times(side.gain.over_first)),
    ]


def _rest(ladder: Ladder, extent: Extent | None) -> list[Column]:
    columns = _pair(ladder, "memory", lambda _, side: formats.memory(side.memory_bytes), "OOM")
    if extent is not None:
        columns += _pair(ladder, "epochs", lambda rung, side: _count(_reach(extent.epochs_of, rung, side)))
        if extent.hours is None:
            columns += _pair(ladder, "time", lambda rung, side: formats.seconds(_reach(extent.seconds_of, rung, side)))
    return columns


def _pair(
    ladder: Ladder, heading: str, shown: Callable[[Rung, Side], str], failed: str = formats.ABSENT
) -> list[Column]:
    """A column of ours, and the published one; ``failed`` stands where the publication ran out of memory."""
    published = [failed if row.rung.ran_out_of_memory else shown(row.rung, row.published) for row in ladder]
    return [Column(heading, [shown(row.rung, row.ours) for row in ladder]), Column("published", published)]


def _times(ratio: float | None) -> str:
    return formats.ABSENT if ratio is None else f"{ratio:.2f}"


def _count(value: float | None) -> str:
    return formats.ABSENT if value is None else f"{value:,.2f}"


def _reach(of: Callable[..., float], rung: Rung, side: Side) -> float | None:
    return None if side.rate is None else of(rung.spec, side.rate)


def _jumps(ladder: Ladder) -> list[str]:
    """Which rung brought most, here and as published."""
    lines = []
    for whose, sides in (("", [row.ours for row in ladder]), (", published", [row.published for row in ladder])):
        index = next((index for index, side in enumerate(sides) if side.is_largest_jump), None)
        if index is None:
            lines.append(f"largest jump{whose}: not known, of no two steps in a row are there figures")
            continue
        rungs = [row.rung for row in ladder]
        after, before = rungs[index], step_before(rungs, index)
        lines.append(f"largest jump{whose}: {after.number}, {_times(sides[index].gain.over_previous)} times ")
        if before is not None:
            changed = ", ".join(settings_differences(before.spec.to_dict(), after.spec.to_dict()))
            lines[-1] += f"{before.number} ({changed})"
    missing = sum(row.ours.rate is None for row in ladder)
    return [*lines, f"{missing} of {len(ladder)} rungs have no baseline here"] if missing else lines


def _notes(extent: Extent | None, scaled: Sequence[Scaling]) -> list[str]:
    notes = [*chapter15.NOTES, *(scaling_tables.NOTES if scaled else ())]
    if extent is not None:
        steps = f"{extent.steps:,} steps" if extent.hours is None else f"{extent.hours:g} hours"
        notes.append(f"epochs: {steps} over {extent.samples:,} samples; the last, smaller batch of an epoch is a step")
    return notes


def _record(machine: str, row: Row, extent: Extent | None) -> dict[str, object]:
    spec = row.rung.spec
    names = ("gpus", "micro_batch_size", "sequence_length", "model_precision", "mixed_precision", "attention", "liger")
    return {
        "machine": plain(machine),
        "model": spec.model,
        "table": row.rung.number,
        **{name: getattr(spec, name) for name in (*names, "optimizer", "torch_compile")},
        **_figures(row.rung, row.ours, extent, ""),
        **_figures(row.rung, row.published, extent, "published_"),
        "published_out_of_memory": row.rung.ran_out_of_memory,
        "source": row.rung.reference.source if row.rung.reference else None,
        "id": spec.id,
        "digest": spec.digest,
    }


def _figures(rung: Rung, side: Side, extent: Extent | None, prefix: str) -> dict[str, object]:
    values: dict[str, object] = {
        RATE: side.rate,
        "peak_reserved_gib": None if side.memory_bytes is None else side.memory_bytes / GIB,
        "speed_up": side.gain.over_previous,
        "speed_up_over_first": side.gain.over_first,
        "largest_jump": side.is_largest_jump,
    }
    if extent is not None:
        reached = {"steps": extent.steps_of, "seconds": extent.seconds_of, "epochs": extent.epochs_of}
        values |= {"samples": extent.samples} if not prefix else {}
        values |= {name: _reach(of, rung, side) for name, of in reached.items()}
    return {f"{prefix}{name}": value for name, value in values.items()}
