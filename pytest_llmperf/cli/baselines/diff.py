"""What ``diff`` says: two baselines side by side, or all of two folders. Pure; A comes first, and ratios are B/A."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_llmperf.cli.baseline_figures import MEMORY, RATE, by_machine, change, figure, shown, spec_defaults
from pytest_llmperf.cli.baseline_folder import Shelf, Stored
from pytest_llmperf.cli.baselines.views import best_figures
from pytest_llmperf.cli.screen import Screen, plain, table
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.evidence.exact_changes import changes
from pytest_llmperf.judge.policy import METRICS
from pytest_llmperf.report.table import Column
from pytest_llmperf.support import formats

Pair = tuple[Stored, Stored]


def diff_page(a: Stored, b: Stored, screen: Screen) -> list[str]:
    """Two baselines: figures, settings, environment, and what was active."""
    lines = [f"{name}  {plain(one.baseline.id)}  {plain(one.path)}" for name, one in (("A", a), ("B", b))]
    if a.baseline.machine != b.baseline.machine:
        lines.append(f"machine: {plain(a.baseline.machine)} -> {plain(b.baseline.machine)}")
    lines += [f"{name} at best  {best_figures(one.baseline)}" for name, one in (("A", a), ("B", b))]
    lines += ["", *_figure_table(a.baseline, b.baseline, screen)]
    environment, active = environment_and_active(a.baseline, b.baseline)
    for title, found in (
        ("settings", settings_differences(a.baseline.spec, b.baseline.spec)),
        ("environment of the newest launches", environment),
        ("what was active", active),
    ):
        lines += ["", title, *(f"  {line}" for line in found or ["no difference"])]
    return lines


def _figure_table(a: Baseline, b: Baseline, screen: Screen) -> list[str]:
    pairs = {name: (figure(a, name), figure(b, name)) for name in METRICS}
    return table(
        [
            Column("", [formats.label(name) for name in pairs], right=False),
            Column("A", [shown(name, mine) for name, (mine, _) in pairs.items()]),
            Column("B", [shown(name, theirs) for name, (_, theirs) in pairs.items()]),
            Column("B/A", [_ratio(mine, theirs) for mine, theirs in pairs.values()]),
            Column("change", [formats.percent(change(theirs, mine)) for mine, theirs in pairs.values()]),
        ],
        screen,
    )


def _ratio(a: float, b: float) -> str:
    return f"{b / a:.3f}" if a else formats.ABSENT


def settings_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """``name: A's -> B's``, sorted; a setting that an older version did not store has its default."""
    defaults = spec_defaults()
    mine, theirs = {**defaults, **a}, {**defaults, **b}
    names = sorted({*mine, *theirs})
    return [
        plain(f"{name}: {mine.get(name)} -> {theirs.get(name)}") for name in names if mine.get(name) != theirs.get(name)
    ]


def environment_and_active(a: Baseline, b: Baseline) -> tuple[list[str], list[str]]:
    """What differs around the newest launches, and what does in what ran and was learnt."""
    mine, theirs = a.launches[-1], b.launches[-1]
    around, active = mine.differences(theirs), changes([theirs], [mine])
    return [plain(line) for line in around], [plain(line) for line in active]


def against_page(a: Shelf, b: Shelf, screen: Screen) -> list[str]:
    """Every case of both folders on a line, what differs and in how many of them, and what only one folder has."""
    pairs = pairs_of(a, b)
    by_path = {mine.path: theirs for mine, theirs in pairs}
    lines = [f"A  {plain(a.root)}", f"B  {plain(b.root)}"]
    for machine, group in by_machine(mine for mine, _ in pairs):
        lines += ["", plain(machine), *_pair_table([(mine, by_path[mine.path]) for mine in group], screen)]
    lines += ["", "what differs, and in how many cases", *_differences(pairs)]
    both = {_identity(one) for pair in pairs for one in pair}
    for name, shelf in (("A", a), ("B", b)):
        alone = [one for one in shelf.stored if _identity(one) not in both]
        if alone:
            lines += ["", f"only in {name}", *(f"  {plain(one.baseline.id)}  {plain(one.path)}" for one in alone)]
    return lines


def pairs_of(a: Shelf, b: Shelf) -> list[Pair]:
    """Baselines of the same digest and machine kind."""
    theirs = {_identity(one): one for one in b.stored}
    return [(one, theirs[_identity(one)]) for one in a.stored if _identity(one) in theirs]


def _identity(stored: Stored) -> tuple[str, str]:
    return stored.baseline.digest, stored.baseline.machine


def _pair_table(pairs: Sequence[Pair], screen: Screen) -> list[str]:
    columns = [Column("case", [plain(mine.baseline.id) for mine, _ in pairs], right=False)]
    for name in (RATE, MEMORY):
        values = [(figure(mine.baseline, name), figure(theirs.baseline, name)) for mine, theirs in pairs]
        columns += [
            Column(f"{formats.label(name)} A", [shown(name, mine) for mine, _ in values]),
            Column("B", [shown(name, theirs) for _, theirs in values]),
            Column("B/A", [_ratio(*pair) for pair in values]),
        ]
    return table(columns, screen)


def _differences(pairs: Sequence[Pair]) -> list[str]:
    counts: Counter[str] = Counter()
    for mine, theirs in pairs:
        environment, active = environment_and_active(mine.baseline, theirs.baseline)
        counts.update({*settings_differences(mine.baseline.spec, theirs.baseline.spec), *environment, *active})
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [f"  {line}  ({number} of {len(pairs)})" for line, number in ordered] or ["  no difference"]
