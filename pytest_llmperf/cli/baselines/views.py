"""What ``list``, ``show`` and ``history`` say: baselines in, lines out. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from pytest_llmperf.cli.baseline_figures import MEMORY, RATE, by_machine, change, figure, shown, spec_defaults
from pytest_llmperf.cli.baseline_folder import Stored, StoredCapacity
from pytest_llmperf.cli.screen import Screen, facts, plain, table
from pytest_llmperf.judge.baseline import Baseline, size_of
from pytest_llmperf.judge.baseline_file import Accepted
from pytest_llmperf.judge.batch_size_baseline import METRIC
from pytest_llmperf.judge.creep import best, since_reason
from pytest_llmperf.judge.policy import METRICS
from pytest_llmperf.records.launch import Environment, Launch
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
            Column(formats.label(RATE), [shown(RATE, figure(one, RATE)) for one in baselines]),
            Column(formats.label(MEMORY), [shown(MEMORY, figure(one, MEMORY)) for one in baselines]),
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
                "baseline": f"{_figures({name: figure(baseline, name) for name in METRICS})} ({size_of(baseline)})",
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
    return f"{shown(RATE, metrics.get(RATE))} {formats.label(RATE)}, {shown(MEMORY, metrics.get(MEMORY))}"


def best_figures(baseline: Baseline) -> str:
    """What creep is held against, for people."""
    reason = plain(since_reason(baseline.history)[0].reason)
    found = {name: value for name in (RATE, MEMORY) if (value := best(baseline.history, name)) is not None}
    return _figures(found) + (f", since the last reason ({reason})" if reason else "")


def _since_the_anchor(baseline: Baseline) -> str:
    changes = {name: change(figure(baseline, name), baseline.anchor.metrics.get(name)) for name in (RATE, MEMORY)}
    return ", ".join(f"{formats.label(name)} {formats.percent(value)}" for name, value in changes.items())


def _launch_table(launches: Sequence[Launch], screen: Screen) -> list[str]:
    mean = fmean(launch.tokens_per_second_per_gpu for launch in launches)
    return table(
        [
            Column("started", [plain(launch.started_at) for launch in launches], right=False),
            Column("site", [short_site(launch.site) for launch in launches], right=False),
            Column("median step", [f"{launch.median_step_seconds:.4g} s" for launch in launches]),
            Column(formats.label(RATE), [shown(RATE, launch.tokens_per_second_per_gpu) for launch in launches]),
            Column("vs mean", [formats.percent(launch.tokens_per_second_per_gpu / mean - 1) for launch in launches]),
            Column(formats.label(MEMORY), [shown(MEMORY, float(launch.peak_reserved_bytes)) for launch in launches]),
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
        Column(formats.label(RATE), [shown(RATE, rate) for rate in rates]),
        Column("vs before", [formats.percent(change(*pair)) for pair in zip(rates, [None, *rates], strict=False)]),
        Column("vs anchor", [formats.percent(change(rate, anchor)) for rate in rates]),
        Column(formats.label(MEMORY), [shown(MEMORY, entry.metrics.get(MEMORY)) for entry in history]),
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
