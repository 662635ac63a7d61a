"""``llmperf expect``: the rate that a training should reach on a kind of GPU, and where a measured one stands."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pytest_llmperf.analysis.expectation import Case, Expectation, published_rates, standing
from pytest_llmperf.analysis.formulas import CHIPS
from pytest_llmperf.cli.answer import Answer, CaseError, Screen, add_option, add_place, plain
from pytest_llmperf.cli.asked_run import named
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.results_document import ResultsError, read_values
from pytest_llmperf.report.results_json import RunDocument
from pytest_llmperf.run.derived_metrics import expectation, newest_launch, stored_cases
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import formats
from pytest_llmperf.support.user_input import hint

_MOST_PARTS = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    parser.add_argument("specs", metavar="SPEC", nargs="+")
    parser.add_argument("--results", metavar="FILE", type=Path)
    add_option(parser, "--json")
    parser.set_defaults(answer=_answer)


def _answer(arguments: argparse.Namespace, _screen: Screen) -> Answer:
    root, cases = arguments.perf_baselines, stored_cases(arguments.perf_baselines)
    words = [word for word in arguments.specs if not word.startswith("gpu=")]
    gpus = [word.removeprefix("gpu=") for word in arguments.specs if word not in words]
    if len(gpus) > 1 or not words or len([word for word in words if "=" not in word]) != ("=" not in words[-1]):
        arguments.usage("expected one case, by its id or in pairs, and one gpu=NAME at most")
    if gpus and arguments.machine:
        arguments.usage(f"gpu={gpus[0]} and --machine {arguments.machine} name the GPU twice, expected one of them")
    # Of an id, which several GPUs may have, the settings are the same on all.
    own: list[Spec] = [one.spec for one in cases if one.spec.id == words[0]]
    (spec,) = own[:1] or [one.spec for one in named(words, root, arguments.machine)]
    if not isinstance(spec, TrainSpec):
        raise CaseError(
            f"{spec.id}: a script, whose work is not known; name what it trains in pairs, e.g. "
            "model=llama-3.2-1b micro_batch_size=8, and its results with --results FILE"
        )
    measured = _measured(arguments.results, spec) if arguments.results else None
    name, launches = gpus[0] if gpus else arguments.machine, measured[1] if measured else []
    # Where a run was is a kind of GPU by itself: its launches tell what the chip gives.
    kind = measured[0] if measured and name is None else _kind(spec, name, cases)
    if (found := expectation(spec, kind, root, launches)) is None:
        raise CaseError(
            f"{spec.id} on {kind}: nothing stored tells of it, expected baselines of this GPU, or of another one and "
            "the rates of both chips, steps of its size, counted work, a case of its kernels, and adapters for adapters"
        )
    newest = next((one for one in reversed(launches) if one.trace), launches[-1] if launches else None)
    newest = newest or newest_launch(spec, kind, root)
    if arguments.json:
        return Answer([json.dumps(_document(found, newest))], for_programs=True)
    return Answer(_page(found, newest))


def _kind(spec: TrainSpec, name: str | None, cases: Sequence[Case]) -> str:
    """The kind of GPU of this name: a stored one, or one of published rates."""
    known = sorted({one.kind for one in cases})
    words = {*(name or "").lower().replace(" ", "-").split("-")}
    found = [name] if name in known else [one for one in known if not name or words <= {*one.split("-")}]
    if len(found) == 1 or (known and name and not found and published_rates(name)):
        return found[0] if found and found[0] else name or ""
    if not known:
        raise CaseError(
            f"{spec.id}: no baselines of a GPU are stored, expected some of any, which tell what it takes; name their "
            "folder with --perf-baselines, or record some: pytest --gpus 1 --update-baselines=new"
        )
    stored = {word for one in known for word in one.split("-")}
    others = [one for one in CHIPS if published_rates(one) and not {*one.split("-")} <= stored]
    near = "" if found else hint(name or "", [*known, *others])
    why = f"{name}: {'several GPUs are' if found else 'no GPU is'} called so" if name else f"{spec.id}: no GPU is named"
    told = f"{', '.join(map(plain, known))}; by published rates alone: {', '.join(others)}"
    raise CaseError(f"{why}{near}, expected gpu= and one of {told}")


def _measured(path: Path, spec: TrainSpec) -> tuple[str, list[Launch]]:
    """The machine kind, and the launches of the case that is meant."""
    try:
        document = RunDocument(read_values(path))
    except ResultsError as error:
        raise CaseError(str(error)) from error
    results = document.results
    own = [one for one in results if one.record.digest == spec.digest] or results[: len(results) == 1]
    if not (launches := [launch for one in own for launch in one.launches]):
        raise CaseError(
            f"{path}: no launch of {spec.id}, expected a case of its settings, or one case alone; it has "
            f"{formats.first_n([one.id for one in results], _MOST_PARTS) or 'none'}"
        )
    if not all(launch.seen.run.is_on_gpu for launch in launches):
        raise CaseError(f"{path}: {own[0].id} was launched on {document.machine}, expected launches on a GPU")
    return document.machine, launches


def _page(found: Expectation, launch: Launch | None) -> Iterator[str]:
    parts = sorted(found.parts.items(), key=lambda each: -each[1])
    shown = [f"{name} {each / found.step_seconds * 100:.0f} %" for name, each in parts[:_MOST_PARTS]]
    yield f"{found.asked.spec.id} on {plain(found.asked.kind)}"
    low, high = map(formats.compact, found.range)
    use = f", MFU {formats.share(found.mfu)}" if found.mfu else ""
    yield f"  expected  {low} to {high} tokens/s per GPU{use}"
    yield f"            nine of ten of {found.judged_by} stored cases were that near (another model's count as one)"
    yield f"  a step    {formats.seconds(found.step_seconds)}, limited by {parts[0][0]}: {', '.join(shown)}"
    yield f"  told by   {found.nearest.spec.id} on {plain(found.nearest.kind)}, most of it"
    yield f"  measured  {standing(found, launch) if launch else 'nothing: --results FILE names some'}"


def _document(found: Expectation, launch: Launch | None) -> dict[str, Any]:
    return {
        "id": found.asked.spec.id,
        "digest": found.asked.digest,
        "machine": found.asked.kind,
        "tokens_per_second_per_gpu": found.rate,
        "range": found.range,
        "judged_by": found.judged_by,
        "step_seconds": found.step_seconds,
        "parts": dict(found.parts),
        "nearest": {"id": found.nearest.spec.id, "machine": found.nearest.kind},
        "mfu": found.mfu,
        "measured": launch.tokens_per_second_per_gpu if launch else None,
        "standing": standing(found, launch) if launch else None,
    }
