"""``llmperf baselines``: what is stored, listed and shown, with each acceptance."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean

from pytest_llmperf.cli.answer import WORDS, Answer, Screen, add_place, facts, plain, table
from pytest_llmperf.cli.baseline_folder import (
    AnyStored,
    Shelf,
    Stored,
    change,
    chosen_settings,
    figure,
    find_any,
    shown,
)
from pytest_llmperf.judge.acceptance import best
from pytest_llmperf.judge.baseline import CAPACITY_METRIC, Baseline, CapacityBaseline, size_of
from pytest_llmperf.judge.store import Accepted, since_reason
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import MEMORY, RATE, label, rate_of
from pytest_llmperf.report.text import Column, rate_heading
from pytest_llmperf.support import formats

# As many hex digits of a commit as git shows at most on its own.
_REVISION = 12
_UUID = re.compile(r"([0-9a-f]{8})(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("list", help=WORDS["baselines"]["list"])
    add_place(one)
    one.set_defaults(answer=_list)
    one = commands.add_parser("show", help=WORDS["baselines"]["show"], description=WORDS["baselines"]["show"])
    add_place(one)
    one.add_argument("case", metavar="CASE")
    one.set_defaults(answer=_show)


def _list(arguments: argparse.Namespace, screen: Screen) -> Answer:
    shelf = Shelf.read(arguments.perf_baselines, arguments.machine)
    lines = [*list_page(shelf.stored, screen), *_capacities_page(shelf.of(CapacityBaseline), screen)]
    return Answer(lines, shelf.troubles)


def _show(arguments: argparse.Namespace, screen: Screen) -> Answer:
    return Answer(show_page(find_any(arguments.case, arguments.perf_baselines, arguments.machine), screen))


def list_page(stored: Sequence[Stored[Baseline]], screen: Screen) -> list[str]:
    lines: list[str] = []
    ordered = sorted((one.baseline for one in stored), key=lambda one: (one.machine, one.id))
    for machine, group in groupby(ordered, key=lambda one: one.machine):
        baselines = [*group]
        rates = [(one, rate_of(one.launches)) for one in baselines]
        figures = [shown(name, figure(one, name)) for one, name in rates]
        columns = [
            Column("case", [plain(one.id) for one in baselines], right=False),
            Column(rate_heading(figures), figures),
            Column(label(MEMORY), [shown(MEMORY, figure(one, MEMORY)) for one in baselines]),
            Column("launches", [str(len(one.launches)) for one in baselines]),
            Column("sessions", [str(one.sessions) for one in baselines]),
            Column("maturity", [one.maturity for one in baselines], right=False),
            Column("accepted", [_day(one.history[-1]) for one in baselines], right=False),
        ]
        if any(len(one.history) > 1 for one in baselines):
            columns += [
                Column("best", [shown(name, best(one.history, name)) for one, name in rates]),
                Column("anchor", [shown(name, one.anchor.metrics.get(name)) for one, name in rates]),
            ]
        lines += [*([""] if lines else []), plain(machine), *table(columns, screen)]
    return lines


def _capacities_page(capacities: Sequence[Stored[CapacityBaseline]], screen: Screen) -> list[str]:
    baselines = [one.baseline for one in capacities]
    columns = [
        Column("machine", [plain(one.machine) for one in baselines], right=False),
        Column("largest micro-batch of", [plain(one.id) for one in baselines], right=False),
        Column("sequences", [str(one.size) for one in baselines]),
        Column("accepted", [_day(one.history[-1]) for one in baselines], right=False),
    ]
    return ["", *table(columns, screen)] if baselines else []


def show_page(stored: AnyStored, screen: Screen) -> list[str]:
    baseline, anchor, chosen = stored.baseline, stored.baseline.anchor, chosen_settings(stored.baseline.spec)
    if isinstance(baseline, CapacityBaseline):  # the micro-batch is what a search was for
        chosen.pop("micro_batch_size", None)
    about: dict[str, object] = {
        "machine": baseline.machine,
        "digest": baseline.digest,
        "file": stored.path,
        "recorded by": baseline.recorded_by + ", uncommitted" * baseline.history[-1].uncommitted,
        "settings": ", ".join(f"{name}={value}" for name, value in chosen.items()),
    }
    if isinstance(baseline, CapacityBaseline):
        first = f"{_sequences(anchor)} sequences of {_day(anchor)}"
        about |= {"largest micro-batch": f"{baseline.size} sequences", "anchor": first}
        return [plain(baseline.id), *facts(about), *_acceptances(baseline, screen)]
    rate = rate_of(baseline.launches)
    now = {name: figure(baseline, name) for name in (rate, MEMORY)}
    environment = baseline.launches[-1].environment
    hardware = {"gpu": environment.gpu, "driver": environment.driver, "platform": environment.platform}
    about |= {"baseline": f"{_figures(now, rate)} ({size_of(baseline)})"}
    about |= {"repeats": baseline.repeats.words(baseline.launches)} if baseline.repeats else {}
    # What creep is held against.
    held = {name: value for name in (rate, MEMORY) if (value := best(baseline.history, name)) is not None}
    reason = plain(since_reason(baseline.history)[0].reason)
    since = f", since the last reason ({reason})" if reason else ""
    about |= {"best": _figures(held, rate) + since, "anchor": f"{_figures(anchor.metrics, rate)} of {_day(anchor)}"}
    tables = [*_acceptances(baseline, screen), "", "launches", *_launch_table(baseline.launches, screen)]
    newest = facts(hardware | dict(sorted(environment.versions.items())))
    return [plain(baseline.id), *facts(about), *tables, "", "environment of the newest launch", *newest]


def _figures(metrics: Mapping[str, float], rate: str) -> str:
    # Other rates say their unit.
    unit = f" {label(RATE)}" if rate == RATE else ""
    return f"{shown(rate, metrics.get(rate))}{unit}, {shown(MEMORY, metrics.get(MEMORY))}"


def _launch_table(launches: Sequence[Launch], screen: Screen) -> list[str]:
    name, mean = rate_of(launches), fmean(launch.tokens_per_second_per_gpu for launch in launches)
    columns = [
        Column("started", [plain(launch.started_at) for launch in launches], right=False),
        Column("site", [short_site(launch.site) for launch in launches], right=False),
        Column("median step", [f"{launch.median_step_seconds:.4g} s" for launch in launches]),
        Column(label(name), [shown(name, launch.tokens_per_second_per_gpu) for launch in launches]),
        Column("vs mean", [formats.percent(launch.tokens_per_second_per_gpu / mean - 1) for launch in launches]),
        Column(label(MEMORY), [shown(MEMORY, float(launch.peak_reserved_bytes)) for launch in launches]),
        Column("steps", [str(len(launch.step_seconds)) for launch in launches]),
        Column("steady from", [f"step {launch.steady.start + 1}" for launch in launches], right=False),
    ]
    return table(columns, screen)


def short_site(site: str) -> str:
    """``NVIDIA H200 0f5ddc53``: eight digits tell a GPU; of several the first, and how many more."""
    first, *others = site.split(" + ")
    return plain(_UUID.sub(r"\1", first)) + (f" + {len(others)} more" if others else "")


def _acceptances(baseline: Baseline | CapacityBaseline, screen: Screen) -> list[str]:
    history = baseline.history
    columns = [Column("accepted", [_day(entry) for entry in history], right=False)]
    if isinstance(baseline, CapacityBaseline):
        columns.append(Column("sequences", [_sequences(entry) for entry in history]))
    else:
        name = rate_of(baseline.launches)
        rates, anchor = [entry.metrics.get(name) for entry in history], baseline.anchor.metrics.get(name)
        columns += [
            Column(label(name), [shown(name, rate) for rate in rates]),
            Column("vs before", [formats.percent(change(*pair)) for pair in zip(rates, [None, *rates], strict=False)]),
            Column("vs anchor", [formats.percent(change(rate, anchor)) for rate in rates]),
            Column(label(MEMORY), [shown(MEMORY, entry.metrics.get(MEMORY)) for entry in history]),
        ]
    commits = [plain(entry.revision)[:_REVISION] + " uncommitted" * entry.uncommitted for entry in history]
    columns += [
        Column("launches", [str(entry.launches) for entry in history]),
        Column("revision", [commit or formats.ABSENT for commit in commits], right=False),
        Column("reason", [plain(entry.reason) or formats.ABSENT for entry in history], right=False),
    ]
    return ["", *table(columns, screen)]


def _sequences(entry: Accepted) -> str:
    return f"{entry.metrics[CAPACITY_METRIC]:.0f}" if CAPACITY_METRIC in entry.metrics else formats.ABSENT


def _day(entry: Accepted) -> str:
    return plain(entry.recorded_at)[:10] or formats.ABSENT
