"""What ``report --tables`` says: a machine's baselines as the chapter's tables, beside the published figures. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pytest_llmperf.analysis import ladder as chapter15
from pytest_llmperf.analysis.ladder import Gain, Rung, gains, largest_jump, step_before
from pytest_llmperf.cli.answer import CaseError
from pytest_llmperf.cli.baseline_folder import Shelf, figure
from pytest_llmperf.cli.baselines.pages import settings_differences
from pytest_llmperf.cli.report import tables
from pytest_llmperf.cli.report.tables import Scaling
from pytest_llmperf.cli.screen import Screen, plain, table
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.records.metrics import MEMORY, RATE
from pytest_llmperf.report.table import Column, escaped, markdown
from pytest_llmperf.support import formats

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
    if not known and not tables.scalings(shelf):
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


def text_page(machine: str, found: Sequence[Ladder], screen: Screen, scaled: Sequence[Scaling] = ()) -> list[str]:
    """For a terminal: one table a model, or two where it is too narrow; and three of several GPUs."""
    lines = [_heading(machine)]
    for ladder in found:
        lines += ["", _subject(ladder)]
        whole = table(_settings(ladder) + _speed(ladder) + _memory(ladder), Screen(None, screen.glyphs))
        if screen.width is None or max(map(len, whole)) <= screen.width:
            lines += whole
        else:
            lines += [*table([_short(ladder), *_speed(ladder)], screen), ""]
            lines += table([_short(ladder), *_memory(ladder)], screen)
        lines += _jumps(ladder)
    return [*lines, *tables.text_lines(scaled, screen), "", *_notes(scaled)]


def markdown_page(machine: str, found: Sequence[Ladder], scaled: Sequence[Scaling] = ()) -> list[str]:
    """For a document."""
    lines = [f"## {escaped(_heading(machine))}"]
    for ladder in found:
        lines += ["", f"### {escaped(_subject(ladder))}", ""]
        lines += markdown(_settings(ladder) + _speed(ladder) + _memory(ladder))
        lines += ["", *(f"- {escaped(line)}" for line in _jumps(ladder))]
    return [
        *lines,
        *tables.markdown_lines(scaled),
        "",
        *(f"- {escaped(line)}" for line in _notes(scaled)),
    ]


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
        *_pair(ladder, "tokens/s/GPU", lambda side: formats.tokens_per_second(side.rate), "OOM"),
        *_pair(ladder, "speed-up", lambda side: _times(side.gain.over_previous)),
        *_pair(ladder, f"over {ladder[0].rung.number}", lambda side: _times(side.gain.over_first)),
    ]


def _memory(ladder: Ladder) -> list[Column]:
    return _pair(ladder, "memory", lambda side: formats.memory(side.memory_bytes), "OOM")


def _pair(ladder: Ladder, heading: str, shown: Callable[[Side], str], failed: str = formats.ABSENT) -> list[Column]:
    """A column of ours, and the published one; ``failed`` stands where the publication ran out of memory."""
    published = [failed if row.rung.ran_out_of_memory else shown(row.published) for row in ladder]
    return [Column(heading, [shown(row.ours) for row in ladder]), Column("published", published)]


def _times(ratio: float | None) -> str:
    return formats.ABSENT if ratio is None else f"{ratio:.2f}"


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


def _notes(scaled: Sequence[Scaling]) -> list[str]:
    return [*chapter15.NOTES, *(tables.NOTES if scaled else ())]
