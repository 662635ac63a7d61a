"""The command: its options, and what it answers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pytest_llmperf.analysis import formulas
from pytest_llmperf.analysis.formulas import MemoryPlan
from pytest_llmperf.cli.answer import Answer, CaseError
from pytest_llmperf.cli.arguments import add_place, add_shared
from pytest_llmperf.cli.baseline_folder import Shelf
from pytest_llmperf.cli.screen import Screen, table
from pytest_llmperf.cli.spec_arguments import Named, all_stored, named
from pytest_llmperf.launch import prediction
from pytest_llmperf.launch.prediction import PredictionError
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.report.table import Column, markdown
from pytest_llmperf.report.text import one_line
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import formats

# ``llmperf plan``: the memory that specs will need, predicted on any machine.


@dataclass(frozen=True)
class Prediction:
    """A spec's predicted memory, and the newest launch that is stored of it, if it is one on a GPU."""

    spec: TrainSpec
    plan: MemoryPlan
    machine: str = ""
    launch: Launch | None = None


def predictions(cases: Sequence[Named]) -> Iterator[Prediction | CaseError]:
    """The prediction for each case, or why there is none, in their order and each as soon as it is known."""
    found = prediction.predictions([case.spec for case in cases])
    for case, parts in zip(cases, found, strict=True):
        yield CaseError(str(parts)) if isinstance(parts, PredictionError) else _prediction(case, MemoryPlan(parts))


def _prediction(case: Named, plan: MemoryPlan) -> Prediction:
    if case.stored is None:
        return Prediction(case.spec, plan)
    baseline = case.stored.baseline
    return Prediction(case.spec, plan, baseline.machine, formulas.newest_on_a_gpu(baseline.launches))


def page(prediction: Prediction) -> list[str]:
    """What is predicted, part by part, and what was measured."""
    spec, plan = prediction.spec, prediction.plan
    lines = [spec.id, _fact("peak allocated", plan.peak_allocated_bytes, "of each rank's GPU")]
    lines += [
        f"    {name:12}  {formats.memory(plan.parts[name], 2):>10}  {text}"
        for name, text in formulas.PARTS.items()
        if plan.parts.get(name)
    ]
    if prediction.launch is not None:
        text = f"{_where(prediction)}; the prediction's error: {_error(prediction)}"
        lines.append(_fact("measured", prediction.launch.peak_allocated_bytes, text))
    elif prediction.machine:
        lines.append(_fact("measured", None, f"on {one_line(prediction.machine)} is no GPU's memory"))
    return [*lines, *(f"  note: {line}" for line in formulas.caveats(spec))]


def _fact(name: str, num_bytes: int | None, text: str) -> str:
    return f"  {name:14}  {formats.memory(num_bytes, 2):>10}  {text}"


def _where(prediction: Prediction) -> str:
    started = prediction.launch.started_at[:10] if prediction.launch else ""
    return one_line(f"on {prediction.machine}, {started}")


def _error(prediction: Prediction) -> str:
    if prediction.launch is None:
        return formats.ABSENT
    text = f"{prediction.plan.error(prediction.launch) * 100:+.2f} %"
    return "0.00 %" if text in ("+0.00 %", "-0.00 %") else text  # neither sign is true of what rounds to nothing


def document(prediction: Prediction) -> dict[str, Any]:
    """The same for programs."""
    spec, plan, launch = prediction.spec, prediction.plan, prediction.launch
    return {
        "id": spec.id,
        "digest": spec.digest,
        "peak_allocated_bytes": plan.peak_allocated_bytes,
        "parts": dict(plan.parts),
        "notes": formulas.caveats(spec),
        "machine": prediction.machine or None,
        "measured_peak_allocated_bytes": launch.peak_allocated_bytes if launch else None,
        "error": plan.error(launch) if launch else None,
    }


def columns(found: Iterable[Prediction]) -> list[Column]:
    """A line for each: predicted beside measured."""
    rows = list(found)
    launches = [row.launch for row in rows]
    return [
        Column("case", [row.spec.id for row in rows], right=False),
        Column("predicted", [formats.memory(row.plan.peak_allocated_bytes, 2) for row in rows]),
        Column("measured", [formats.memory(launch.peak_allocated_bytes if launch else None, 2) for launch in launches]),
        Column("error", [_error(row) for row in rows]),
        Column("measured on", [one_line(row.machine) if row.launch else formats.ABSENT for row in rows], right=False),
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of ``llmperf plan``."""
    add_place(parser)
    parser.add_argument("specs", metavar="SPEC", nargs="*", help="ids of stored cases, or one spec in key=value pairs")
    parser.add_argument("--stored", action="store_true", help="every stored case")
    how = parser.add_mutually_exclusive_group()
    add_shared(how, "plan", "--json", "--format")
    parser.set_defaults(answer=_answer, usage=parser.error)


def _answer(arguments: argparse.Namespace, screen: Screen) -> Answer:
    root, machine = arguments.perf_baselines, arguments.machine
    usage: Callable[[str], NoReturn] = arguments.usage
    if arguments.stored == bool(arguments.specs):
        usage("expected specs, or --stored and none")
    cases, troubles = named(arguments.specs, root, machine), list[str]()
    if arguments.stored:
        cases, troubles = all_stored(Shelf.read(root, machine))
    found = _predicted(cases, troubles)
    if arguments.json:
        return Answer((json.dumps(document(one)) for one in found), troubles, for_programs=True)
    if arguments.format is None:
        return Answer((line for one in found for line in page(one)), troubles)
    rows = list(found)
    if arguments.format == "markdown":
        return Answer(markdown(columns(rows)), troubles, for_programs=True)
    return Answer(table(columns(rows), screen), troubles)


def _predicted(cases: Sequence[Named], troubles: list[str]) -> Iterator[Prediction]:
    for one in predictions(cases):
        if isinstance(one, CaseError):
            troubles.append(str(one))
        else:
            yield one
