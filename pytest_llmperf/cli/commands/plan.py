"""``llmperf plan`` and ``scale``: the memory of specs, and what a step takes of each of many ranks, on any machine."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pytest_llmperf.analysis.formulas import PARTS, Measured, MemoryPlan, caveats, newest_on_a_gpu
from pytest_llmperf.cli.answer import Answer, CaseError, Screen, add_option, add_place, table
from pytest_llmperf.cli.asked_run import Named, all_stored, named
from pytest_llmperf.cli.baseline_folder import Shelf, check_machine
from pytest_llmperf.judge.baseline import BaselineStore
from pytest_llmperf.launch import prediction
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.trace import StaticStep
from pytest_llmperf.report.text import Column, markdown, one_line
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import formats
from pytest_llmperf.support.user_input import argument, positive, whole


@dataclass(frozen=True)
class Prediction:
    """A spec's predicted memory, and the newest launch that is stored of it, if it is one on a GPU."""

    spec: TrainSpec
    plan: MemoryPlan
    machine: str = ""
    launch: Launch | None = None

    @property
    def error(self) -> str:
        if self.launch is None:
            return formats.ABSENT
        text = f"{self.plan.error(self.launch) * 100:+.2f} %"
        return "0.00 %" if text in ("+0.00 %", "-0.00 %") else text  # neither sign is true of what rounds to nothing


def predictions(cases: Sequence[Named], troubles: list[str]) -> Iterator[Prediction]:
    """The prediction for each case, in their order, each as soon as it is known; ``troubles``: why there is none."""
    known = [(case.spec, case.stored) for case in cases if isinstance(case.spec, TrainSpec)]
    for (spec, stored), parts in zip(known, prediction.predictions([spec for spec, _ in known]), strict=True):
        if isinstance(parts, prediction.PredictionError):
            troubles.append(str(parts))
        elif stored is None:
            yield Prediction(spec, MemoryPlan(parts))
        else:
            newest = newest_on_a_gpu(stored.baseline.launches)
            yield Prediction(spec, MemoryPlan(parts), stored.baseline.machine, newest)
    scripts = (case.spec.id for case in cases if case.spec.is_script)
    troubles.extend(f"{each}: a script, whose memory is not predicted; llmperf script measures it" for each in scripts)


def page(one: Prediction) -> list[str]:
    def fact(name: str, num_bytes: int | None, text: str) -> str:
        return f"  {name:14}  {formats.memory(num_bytes, 2):>10}  {text}"

    lines = [one.spec.id, fact("peak allocated", one.plan.peak_allocated_bytes, "of each rank's GPU")]
    lines += [
        f"    {name:12}  {formats.memory(one.plan.parts[name], 2):>10}  {text}"
        for name, text in PARTS.items()
        if one.plan.parts.get(name)
    ]
    if one.launch is not None:
        where = one_line(f"on {one.machine}, {one.launch.started_at[:10]}")
        lines.append(fact("measured", one.launch.peak_allocated_bytes, f"{where}; the prediction's error: {one.error}"))
    elif one.machine:
        lines.append(fact("measured", None, f"on {one_line(one.machine)} is no GPU's memory"))
    return [*lines, *(f"  note: {line}" for line in caveats(one.spec))]


def document(one: Prediction) -> dict[str, Any]:
    spec, plan, launch = one.spec, one.plan, one.launch
    return {
        "id": spec.id,
        "digest": spec.digest,
        "peak_allocated_bytes": plan.peak_allocated_bytes,
        "parts": dict(plan.parts),
        "notes": caveats(spec),
        "machine": one.machine or None,
        "measured_peak_allocated_bytes": launch.peak_allocated_bytes if launch else None,
        "error": plan.error(launch) if launch else None,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    parser.add_argument("specs", metavar="SPEC", nargs="*")
    parser.add_argument("--stored", action="store_true")
    how = parser.add_mutually_exclusive_group()
    add_option(how, "--json")
    add_option(how, "--format")
    parser.set_defaults(answer=_answer)


def _answer(arguments: argparse.Namespace, screen: Screen) -> Answer:
    root, machine = arguments.perf_baselines, arguments.machine
    if arguments.stored == bool(arguments.specs):
        arguments.usage("expected specs, or --stored and none")
    check_machine(root, machine)
    if arguments.stored:
        cases, troubles = all_stored(Shelf.read(root, machine))
    else:
        cases, troubles = named(arguments.specs, root, machine), []
    found = predictions(cases, troubles)
    if arguments.json:
        return Answer((json.dumps(document(one)) for one in found), troubles, for_programs=True)
    if arguments.format is None:
        return Answer((line for one in found for line in page(one)), troubles)
    rows = list(found)
    measured = [row.launch.peak_allocated_bytes if row.launch else None for row in rows]
    columns = [
        Column("case", [row.spec.id for row in rows], right=False),
        Column("predicted", [formats.memory(row.plan.peak_allocated_bytes, 2) for row in rows]),
        Column("measured", [formats.memory(num_bytes, 2) for num_bytes in measured]),
        Column("error", [row.error for row in rows]),
        Column("measured on", [one_line(row.machine) if row.launch else formats.ABSENT for row in rows], right=False),
    ]
    if arguments.format == "markdown":
        return Answer(markdown(columns), troubles, for_programs=True)
    return Answer(table(columns, screen), troubles)


# Scale: what a step takes of one of so many ranks, the fullest.

_Scaled = tuple[TrainSpec, StaticStep, tuple[float, float] | None]


def add_scale_options(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    parser.add_argument("specs", metavar="SPEC", nargs="+")
    ranks = argument(_numbers, "numbers of ranks, 2 or more each, e.g. 8,64,1024")
    parser.add_argument("--ranks", type=ranks, required=True, metavar="N,N")
    node = argument(partial(whole, least=1), "a number of ranks")
    parser.add_argument("--ranks-per-node", type=node, default=8, metavar="N")
    pairs = argument(_seconds, "seconds of a step by number of GPUs, e.g. 1:0.79,4:0.87")
    parser.add_argument("--measured", type=pairs, default={}, metavar="GPUS:SECONDS,…")
    rates = argument(_rates, "one rate, or two, above 0, e.g. 290,25")
    parser.add_argument("--bandwidth", type=rates, default=(), metavar="GB/S,GB/S")
    add_option(parser, "--json")
    parser.set_defaults(answer=_scale)


def _seconds(text: str) -> dict[int, tuple[float, float]] | None:
    pairs = [one.partition(":") for one in text.split(",")]
    found = {whole(ranks, least=1): positive(seconds) for ranks, _, seconds in pairs}
    told = {ranks: (each, each) for ranks, each in found.items() if ranks and each}
    return told if len(told) == len(pairs) else None


def _rates(text: str) -> list[float] | None:
    found = [1e9 * (positive(each) or 0.0) for each in text.split(",")]
    return found if all(found) and len(found) <= 2 else None  # noqa: PLR2004 - two kinds of links


def _numbers(text: str) -> list[int] | None:
    found = [whole(each, least=2) for each in text.split(",")]
    return [each for each in found if each] if all(found) else None


def _scale(arguments: argparse.Namespace, screen: Screen) -> Answer:
    words, ranks, node = [*arguments.specs], arguments.ranks, arguments.ranks_per_node
    if any("=" in word for word in words) and not any(word.startswith("gpus=") for word in words):
        words.append(f"gpus={ranks[0]}")
    check_machine(arguments.perf_baselines, arguments.machine)
    names = named(words, arguments.perf_baselines, arguments.machine)
    cases = [each.spec for each in names]
    troubles = [f"{spec.id}: a script, whose ranks are not told without a launch" for spec in cases if spec.is_script]
    for number in ranks:
        if number > node and number % node:
            raise CaseError(f"--ranks {number}: expected whole nodes of {node}; --ranks-per-node says of how many")
    try:
        numbers = [*ranks, *(number for number in arguments.measured if number > 1)]
        every = [[replace(spec, gpus=number) for number in numbers] for spec in cases if isinstance(spec, TrainSpec)]
    except ValueError as error:
        raise CaseError(str(error)) from error
    known = [_known(arguments, each) for each in names if isinstance(each.spec, TrainSpec)]
    found = _scaled([one[: len(ranks)] for one in every], known, troubles)
    if arguments.json:
        return Answer((json.dumps(scale_document(one)) for rows in found for one in rows), troubles, for_programs=True)
    return Answer((line for rows in found if rows for line in _scale_page(rows, screen)), troubles)


def _known(arguments: argparse.Namespace, case: Named) -> Measured:
    """What is stored of narrower widths on its machine kind, or said."""
    machine = arguments.machine or (case.stored.baseline.machine if case.stored else "")
    store = BaselineStore(arguments.perf_baselines)
    widest = case.spec.changed(gpus=max(arguments.ranks))
    stored = [store.load(machine, spec) for spec in (widest, *widest.narrower())] if machine else []
    launches = [launch for baseline in stored if baseline for launch in baseline.launches]
    seconds, rates = dict[int, tuple[float, float]](), dict[bool, float]()
    for launch in launches:
        low, high = seconds.get(len(launch.ranks), (math.inf, 0.0))
        seconds[len(launch.ranks)] = min(low, launch.median_step_seconds), max(high, launch.median_step_seconds)
        if rate := launch.canary.get("all_reduce_bytes_per_second"):
            rates[launch.is_on_a_node] = min(rate, rates.get(launch.is_on_a_node, math.inf))
    said = dict(zip((True, False), arguments.bandwidth, strict=False))
    on_a_node, between_nodes = ((rates | said).get(each) for each in (True, False))
    return Measured(seconds | arguments.measured, arguments.ranks_per_node, on_a_node, between_nodes)


def _scaled(wide: Sequence[list[TrainSpec]], known: Sequence[Measured], troubles: list[str]) -> Iterator[list[_Scaled]]:
    """Of each spec its step at each number of ranks, as soon as all are known; ``troubles``: why there is none."""
    with closing(prediction.StaticSteps(known[0].ranks_per_node if known else 0)) as steps:
        steps.ask(each for one in wide for each in one)
        for one, measured in zip(wide, known, strict=True):
            rows = [(each, steps.of(each)) for each in one]
            troubles += [str(step) for _, step in rows if isinstance(step, prediction.PredictionError)]
            told = [(each, step) for each, step in rows if isinstance(step, StaticStep)]
            yield [(each, step, measured.step_range(each, step, steps.of)) for each, step in told]


def scale_document(one: _Scaled) -> dict[str, Any]:
    spec, step, seconds = one
    return {
        "id": spec.id,
        "digest": spec.digest,
        "step_seconds": seconds,
        "ranks": spec.gpus,
        "peak_allocated_bytes": step.peak_bytes,
        "parts": dict(step.memory),
        "flops_per_step": sum(step.flops.values()),
        "padding_bytes": step.padding,
        "collectives": {name: {"count": n, "bytes": size} for name, (n, size) in sorted(step.exchanges.items())},
        "versions": dict(step.versions),
        "notes": _notes(spec),
    }


def _notes(spec: TrainSpec) -> list[str]:
    return [line for line in caveats(spec) if "counted on one node" not in line]  # by plan alone


def _scale_page(rows: Sequence[_Scaled], screen: Screen) -> Iterator[str]:
    spec, steps = rows[0][0], [step for _, step, _ in rows]
    names = sorted({name for step in steps for name in step.exchanges})

    def asked(step: StaticStep, name: str) -> str:
        count, size = step.exchanges.get(name, (0, 0))
        return f"{count:g}, {formats.memory(size, 2)}" if count else formats.ABSENT

    columns = [
        Column("ranks", [f"{each.gpus:,}" for each, _, _ in rows]),
        Column("memory", [formats.memory(step.peak_bytes, 2) for step in steps]),
        Column("arithmetic", [formats.flops(sum(step.flops.values())) for step in steps]),
        *(Column(name, [asked(step, name) for step in steps]) for name in names),
    ]
    if any(step.padding for step in steps):
        columns.append(Column("padding of shards", [formats.memory(step.padding, 2) for step in steps]))
    if any(seconds for _, _, seconds in rows):
        columns.append(Column("step", [f"{s[0]:.3g} to {s[1]:.3g} s" if s else formats.ABSENT for _, _, s in rows]))
    yield f"{spec.id.rpartition('-gpus')[0]}: a step of one rank, the fullest"
    yield from table(columns, screen)
    yield from (f"  note: {line}" for line in _notes(spec))
    if any(seconds for _, _, seconds in rows):
        yield "  note: a step's time is a range, from what fewer GPUs took to that with more exchanges, none hidden"
