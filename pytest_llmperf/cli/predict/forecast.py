"""Outlook: what ``llmperf predict`` is asked (which training, points and network), fitted, and what is assumed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_llmperf.cli.baseline_folder import Shelf
from pytest_llmperf.cli.command_error import CaseError
from pytest_llmperf.cli.scaling_series import Series, all_series, series_of
from pytest_llmperf.cli.screen import plain
from pytest_llmperf.cli.spec_arguments import named
from pytest_llmperf.insight import chapter15, communication_model, scaling_model
from pytest_llmperf.insight.communication_model import Workload
from pytest_llmperf.insight.scaling_model import Fit, Prediction
from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.support import formats

_GRADIENT_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
#: Of most machines with this many GPUs to a board.
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Outlook:
    """A fit, what it predicts, and what was measured or assumed."""

    subject: str
    points: Mapping[int, float]
    """All that was measured, also what the fit was not shown."""
    fit: Fit
    rows: Sequence[Prediction]
    notes: Sequence[str]
    """What is assumed, and what the points cannot tell."""

    def error(self, row: Prediction) -> float | None:
        """Of the prediction, against what was measured."""
        measured = self.points.get(row.gpus)
        return None if measured is None else row.rate / measured - 1


@dataclass(frozen=True)
class _Subject:
    spec: TrainSpec
    points: Mapping[int, float]
    parameters: int | None
    gpus_per_node: int | None
    source: str


def outlook(arguments: argparse.Namespace) -> Outlook:
    """What ``arguments`` ask for.

    Raises:
        BaselineError: the file of a case cannot serve.
        CaseError: nothing to fit, or a training that the model is not of; one line.
    """
    subject = _subject(arguments)
    spec, most = subject.spec, arguments.fit_up_to or math.inf
    if spec.parallelism != "ddp":
        raise CaseError(f"{spec.id}: parallelism={spec.parallelism} is not modelled, expected ddp")
    shown = {gpus: rate for gpus, rate in subject.points.items() if gpus <= most}
    least = 1 if arguments.network_from else 2
    if len(shown) < least:
        raise CaseError(
            f"{subject.source}: {len(shown)} number(s) of GPUs to fit, expected {least} at least; "
            "record more, give --points, or a sister case's network with --network-from CASE"
        )
    workload, notes = _workload(subject, arguments)
    prior = None
    if arguments.network_from:
        sister = _named_series([arguments.network_from], arguments.perf_baselines, arguments.machine)
        theirs, _ = _workload(_stored(sister), arguments)
        prior = scaling_model.transferred(scaling_model.fit(sister.rates, theirs), shown, workload)
        notes = [*notes, f"assumed: the network is as {plain(sister.name)} met it at {_list(sister.rates)} GPUs"]
    fit = scaling_model.fit(shown, workload, prior)
    asked = sorted({*arguments.gpus, *subject.points})
    rows = [scaling_model.predict(fit, gpus) for gpus in asked]
    return Outlook(
        f"{subject.source}: fitted to {_list(shown)} GPUs", subject.points, fit, rows, [*notes, *_unseen(fit)]
    )


def _subject(arguments: argparse.Namespace) -> _Subject:
    root, machine = arguments.perf_baselines, arguments.machine
    if arguments.points is None:
        series = _named_series(arguments.case, root, machine) if arguments.case else _only_series(root, machine)
        return _stored(series)
    if not arguments.case:
        spec = chapter15.LLAMA_WIDTHS[0].spec
        return _Subject(spec, arguments.points, None, None, f"given points of (assumed) {_name(spec)}")
    spec = _one_spec(arguments.case, root, machine)
    return _Subject(spec, arguments.points, None, None, f"given points of {_name(spec)}")


def _stored(series: Series) -> _Subject:
    source = f"{plain(series.name)} on {plain(series.machine)}"
    return _Subject(series.spec, series.rates, series.parameters, series.gpus_per_node, source)


def _named_series(words: Sequence[str], root: Path, machine: str | None) -> Series:
    return series_of(_one_spec(words, root, machine), Shelf.read(root, machine))


def _one_spec(words: Sequence[str], root: Path, machine: str | None) -> TrainSpec:
    cases = named(words, root, machine)
    if len(cases) != 1:
        raise CaseError(f"{len(cases)} cases are named, expected one")
    return cases[0].spec


def _only_series(root: Path, machine: str | None) -> Series:
    shelf = Shelf.read(root, machine)
    known = [one for one in all_series(shelf) if len(one.baselines) > 1 and one.spec.parallelism == "ddp"]
    if len(known) != 1:
        names = f": {', '.join(plain(one.spec.id) for one in known)}" if known else ""
        raise CaseError(
            f"{root}: {len(known)} trainings are stored of several numbers of GPUs, expected one{names}; "
            "name a CASE, or give --points GPUS:TOKENS_PER_SECOND_PER_GPU,…"
        )
    return known[0]


def _name(spec: TrainSpec) -> str:
    return spec.id.removesuffix(f"-gpus{spec.gpus}")


def _list(widths: Mapping[int, float]) -> str:
    return ", ".join(map(str, sorted(widths)))


def _workload(subject: _Subject, arguments: argparse.Namespace) -> tuple[Workload, list[str]]:
    """And what is assumed in it, a line each."""
    spec = subject.spec
    parameters, counted = subject.parameters, "as counted in a launch"
    if parameters is None:
        geometry = spec.architecture.geometry
        if geometry is None:
            raise CaseError(f"{spec.id}: the parameters of this family are not known here; name one that was measured")
        parameters, counted = communication_model.num_weights(geometry), "of its matrices"
    per_node = arguments.gpus_per_node or subject.gpus_per_node or GPUS_PER_NODE
    how = (
        "as asked"
        if arguments.gpus_per_node
        else "as stored"
        if subject.gpus_per_node
        else "unless --gpus-per-node says"
    )
    each = _GRADIENT_BYTES[spec.model_precision]
    work = Workload(
        tokens_per_step_per_gpu=replace(spec, gpus=1).sequences_per_step * spec.sequence_length,
        gradient_bytes=float(each * parameters),
        gpus_per_node=per_node,
        algorithm=arguments.algorithm,
    )
    size = f"{work.gradient_bytes / 1e9:.2f} GB in {work.buckets} buckets"
    return work, [
        f"assumed: weak scaling, {work.tokens_per_step_per_gpu:,} tokens a step on each GPU, one all-reduce each (ddp)",
        f"assumed: gradients of {parameters:,} parameters ({counted}) of {each} bytes ({spec.model_precision}), {size}",
        f"assumed: {per_node} GPUs a node ({how}), nodes alike, a network that nobody else loads",
    ]


def _unseen(fit: Fit) -> list[str]:
    """What the points cannot tell."""
    lines = []
    widest, per_node = max(fit.points), fit.workload.gpus_per_node
    if widest <= per_node and fit.prior.points == 0:
        lines.append(
            f"note: between nodes nothing was measured: beyond {per_node} GPUs this rests on networks in general"
        )
    if fit.point_noise > scaling_model.POINT_NOISE:
        lines.append(f"note: the model misses its points by about {formats.share(fit.point_noise)}; the interval knows")
    return lines
