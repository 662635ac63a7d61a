"""What ``list``, ``show`` and ``history`` say: baselines in, lines out. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from pytest_llmperf.cli.baseline_folder import (
    Shelf,
    Stored,
    StoredCapacity,
    StoredCurves,
    by_machine,
    change,
    figure,
    shown,
    spec_defaults,
)
from pytest_llmperf.cli.screen import Screen, facts, plain, table
from pytest_llmperf.judge.acceptance import best, since_reason
from pytest_llmperf.judge.baseline import Baseline, size_of
from pytest_llmperf.judge.baseline_file import Accepted
from pytest_llmperf.judge.batch_size_baseline import METRIC
from pytest_llmperf.judge.exact import changes
from pytest_llmperf.judge.loss_curves import CurveBaseline, spans, spreads
from pytest_llmperf.records.launch import Environment, Launch
from pytest_llmperf.records.metrics import MEMORY, RATE, label, measured
from pytest_llmperf.report.table import Column
from pytest_llmperf.support import formats

# As many hex digits of a commit as git shows at most on its own.
_REVISION = 12

_UUID = re.compile(r"([0-9a-f]{8})(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def list_page(stored: Sequence[Stored], screen: Screen) -> list[str]:
    """A table of its baselines for each machine kind."""
    lines: list[str] = []
    for machine, group in by_machine(stored):
        lines += [*([""] if lines else []), plain(machine), *_list_table([one.baseline for one in group], screen)]
    return lines


def _list_table(baselines: Sequence[Baseline], screen: Screen) -> list[str]:
    return table(
        [
            Column("case", [plain(one.id) for one in baselines], right=False),
            Column(label(RATE), [shown(RATE, figure(one, RATE)) for one in baselines]),
            Column(label(MEMORY), [shown(MEMORY, figure(one, MEMORY)) for one in baselines]),
            Column("launches", [str(len(one.launches)) for one in baselines]),
            Column("sessions", [str(one.sessions) for one in baselines]),
            Column("maturity", [one.maturity for one in baselines], right=False),
            Column("accepted", [_day(one.history[-1]) for one in baselines], right=False),
            *_then(baselines),
        ],
        screen,
    )


def _then(baselines: Sequence[Baseline]) -> list[Column]:
    """The best since the last reason, and the first; nothing where each was accepted once."""
    if all(len(one.history) == 1 for one in baselines):
        return []
    return [
        Column("best", [shown(RATE, best(one.history, RATE)) for one in baselines]),
        Column("anchor", [shown(RATE, one.anchor.metrics.get(RATE)) for one in baselines]),
    ]


def capacity_page(capacities: Sequence[StoredCapacity], screen: Screen) -> list[str]:
    """A table of the largest micro-batches, or nothing."""
    if not capacities:
        return []
    baselines = [one.baseline for one in capacities]
    columns = [
        Column("machine", [plain(one.machine) for one in baselines], right=False),
        Column("largest micro-batch of", [plain(one.id) for one in baselines], right=False),
        Column("sequences", [str(one.size) for one in baselines]),
        Column("accepted", [_day(one.history[-1]) for one in baselines], right=False),
    ]
    return ["", *table(columns, screen)]


def show_capacity_page(stored: StoredCapacity) -> list[str]:
    """Everything about one largest micro-batch."""
    baseline = stored.baseline
    spec = {name: value for name, value in baseline.spec.items() if name != "micro_batch_size"}  # what was searched for
    return [
        plain(baseline.id),
        *facts(
            {
                **_about(stored, spec),
                "largest micro-batch": f"{baseline.size} sequences",
                "anchor": f"{_sequences(baseline.anchor)} sequences of {_day(baseline.anchor)}",
            }
        ),
    ]


def _about(stored: Stored | StoredCapacity, spec: Mapping[str, Any]) -> dict[str, object]:
    baseline = stored.baseline
    return {
        "machine": baseline.machine,
        "digest": baseline.digest,
        "file": stored.path,
        "recorded by": baseline.recorded_by + ", uncommitted" * baseline.history[-1].uncommitted,
        "settings": ", ".join(f"{name}={value}" for name, value in _chosen(spec).items()),
    }


def history_capacity_page(stored: StoredCapacity, screen: Screen) -> list[str]:
    """A line for each acceptance of a largest micro-batch, oldest first."""
    baseline, history = stored.baseline, stored.baseline.history
    columns = [
        Column("accepted", [_day(entry) for entry in history], right=False),
        Column("sequences", [_sequences(entry) for entry in history]),
        *_why(history),
    ]
    return [f"{plain(baseline.id)} on {plain(baseline.machine)}", *table(columns, screen)]


def _sequences(entry: Accepted) -> str:
    return f"{entry.metrics[METRIC]:.0f}" if METRIC in entry.metrics else formats.ABSENT


def show_page(stored: Stored, screen: Screen) -> list[str]:
    """Everything about one baseline that a person asks for."""
    baseline = stored.baseline
    return [
        plain(baseline.id),
        *facts(
            {
                **_about(stored, baseline.spec),
                "baseline": f"{_figures({name: figure(baseline, name) for name in measured()})} ({size_of(baseline)})",
                "best": best_figures(baseline),
                "anchor": f"{_figures(baseline.anchor.metrics)} of {_day(baseline.anchor)}",
                "since then": _since_the_anchor(baseline),
            }
        ),
        "",
        "launches",
        *_launch_table(baseline.launches, screen),
        "",
        "environment of the newest launch",
        *_environment(baseline.launches[-1].environment),
    ]


def _chosen(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not TrainSpec's defaults."""
    defaults = spec_defaults()
    return {name: value for name, value in spec.items() if name not in defaults or value != defaults[name]}


def _figures(metrics: Mapping[str, float]) -> str:
    return f"{shown(RATE, metrics.get(RATE))} {label(RATE)}, {shown(MEMORY, metrics.get(MEMORY))}"


def best_figures(baseline: Baseline) -> str:
    """What creep is held against, for people."""
    reason = plain(since_reason(baseline.history)[0].reason)
    found = {name: value for name in (RATE, MEMORY) if (value := best(baseline.history, name)) is not None}
    return _figures(found) + (f", since the last reason ({reason})" if reason else "")


def _since_the_anchor(baseline: Baseline) -> str:
    changes = {name: change(figure(baseline, name), baseline.anchor.metrics.get(name)) for name in (RATE, MEMORY)}
    return ", ".join(f"{label(name)} {formats.percent(value)}" for name, value in changes.items())


def _launch_table(launches: Sequence[Launch], screen: Screen) -> list[str]:
    mean = fmean(launch.tokens_per_second_per_gpu for launch in launches)
    return table(
        [
            Column("started", [plain(launch.started_at) for launch in launches], right=False),
            Column("site", [short_site(launch.site) for launch in launches], right=False),
            Column("median step", [f"{launch.median_step_seconds:.4g} s" for launch in launches]),
            Column(label(RATE), [shown(RATE, launch.tokens_per_second_per_gpu) for launch in launches]),
            Column("vs mean", [formats.percent(launch.tokens_per_second_per_gpu / mean - 1) for launch in launches]),
            Column(label(MEMORY), [shown(MEMORY, float(launch.peak_reserved_bytes)) for launch in launches]),
            Column("steps", [str(len(launch.step_seconds)) for launch in launches]),
            Column("steady from", [f"step {launch.steady.start + 1}" for launch in launches], right=False),
        ],
        screen,
    )


def short_site(site: str) -> str:
    """``NVIDIA H200 0f5ddc53``: eight digits tell a GPU; of several the first, and how many more."""
    first, *others = site.split(" + ")
    return plain(_UUID.sub(r"\1", first)) + (f" + {len(others)} more" if others else "")


def _environment(environment: Environment) -> list[str]:
    hardware = {"gpu": environment.gpu, "driver": environment.driver, "platform": environment.platform}
    return facts({**hardware, **dict(sorted(dict(environment.versions).items()))})


def history_page(stored: Stored, screen: Screen) -> list[str]:
    """A line for each acceptance, oldest first."""
    baseline, history = stored.baseline, stored.baseline.history
    rates = [entry.metrics.get(RATE) for entry in history]
    anchor = baseline.anchor.metrics.get(RATE)
    columns = [
        Column("accepted", [_day(entry) for entry in history], right=False),
        Column(label(RATE), [shown(RATE, rate) for rate in rates]),
        Column("vs before", [formats.percent(change(*pair)) for pair in zip(rates, [None, *rates], strict=False)]),
        Column("vs anchor", [formats.percent(change(rate, anchor)) for rate in rates]),
        Column(label(MEMORY), [shown(MEMORY, entry.metrics.get(MEMORY)) for entry in history]),
        *_why(history),
    ]
    return [f"{plain(baseline.id)} on {plain(baseline.machine)}", *table(columns, screen)]


def _why(history: Sequence[Accepted]) -> list[Column]:
    return [
        Column("launches", [str(entry.launches) for entry in history]),
        Column("revision", [_revision(entry) for entry in history], right=False),
        Column("reason", [plain(entry.reason) or formats.ABSENT for entry in history], right=False),
    ]


def _revision(entry: Accepted) -> str:
    """The commit that was measured, and whether it was all that was."""
    return plain(entry.revision)[:_REVISION] + " uncommitted" * entry.uncommitted or formats.ABSENT


def _day(entry: Accepted) -> str:
    return plain(entry.recorded_at)[:10] or formats.ABSENT


# What ``diff`` says: two baselines side by side, or all of two folders. Pure; A comes first, and ratios are B/A.


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
    pairs = {name: (figure(a, name), figure(b, name)) for name in measured()}
    return table(
        [
            Column("", [label(name) for name in pairs], right=False),
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
            Column(f"{label(name)} A", [shown(name, mine) for mine, _ in values]),
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


# What ``list`` and ``show`` say of loss curves, which no machine kind has.


def curve_page(path: Path, found: CurveBaseline, screen: Screen) -> list[str]:
    """Everything about the loss curves in ``path``."""
    return [plain(found.id), *facts(_curve_page_about(path, found)), "", *_parts(found, screen)]


def curve_list_page(stored: Sequence[StoredCurves], screen: Screen) -> list[str]:
    """A table of all, or nothing."""
    if not stored:
        return []
    baselines = [one.baseline for one in stored]
    columns = [
        Column("loss curves of", [plain(one.id) for one in baselines], right=False),
        Column("seeds", [str(len(one.seeds)) for one in baselines]),
        Column("steps", [str(one.steps) for one in baselines]),
        Column("trained on", [plain(one.device) or formats.ABSENT for one in baselines], right=False),
        Column("accepted", [plain(one.recorded_at)[:10] for one in baselines], right=False),
    ]
    return table(columns, screen)


def _curve_page_about(path: Path, found: CurveBaseline) -> Mapping[str, object]:
    return {
        "loss curves": f"{len(found.curves)} seeds ({', '.join(map(str, found.seeds))}) of {found.steps} steps",
        "digest": found.digest,
        "file": path,
        "recorded by": found.recorded_by,
        "accepted": f"{found.recorded_at[:10]}" + (f" ({found.reason})" if found.reason else ""),
        "device": found.device,
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(found.versions.items())),
    }


def _parts(found: CurveBaseline, screen: Screen) -> list[str]:
    parts = spreads(list(found.losses.values()))
    return table(
        [
            Column("steps", [f"{span.first} to {span.last}" for span in spans(found.steps)]),
            Column("loss", [f"{part.mean:.4f}" for part in parts]),
            Column("sd of seeds", [f"{part.sd / part.mean:.2%}" for part in parts]),
            Column("is nothing", [f"{part.nothing / part.mean:.2%}" for part in parts]),
        ],
        screen,
    )
