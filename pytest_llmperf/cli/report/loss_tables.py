"""What ``report --losses`` says: trainings of ``--perf-json`` files by what they had learnt by when."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_llmperf.cli.results_launch import results_launch
from pytest_llmperf.cli.screen import Screen, plain, table
from pytest_llmperf.insight import lab10
from pytest_llmperf.insight.loss_in_time import STEPS, LossInTime, common_times
from pytest_llmperf.report.exports import comma_separated, escaped, markdown
from pytest_llmperf.report.table import Column
from pytest_llmperf.support import formats

_NOTES = (
    f"a loss is the mean of {STEPS} steps, in nats a token: of other rows or tokenizers it is another quantity",
    "time: of the steps of the first launch, from the first one's begin; a training that was over by then has no loss",
)
_PUBLISHED = "other weights, tokens and data than ours: rates may stand beside each other, losses not"
_EXPECTED = "what a run that launched wrote: name it in that run with --perf-json=FILE"


@dataclass(frozen=True)
class Training:
    """The first launch of one case."""

    case: str
    rate: float | None
    """Tokens/s of each GPU: slots, padding among them."""
    real_rate: float | None
    """Of real tokens, where rows have padding."""
    epochs: float | None
    on_text: bool
    curve: LossInTime


def trainings(paths: Sequence[Path]) -> tuple[list[Training], list[str]]:
    """Of all results in the files, and a line for each file that cannot serve."""
    found, troubles = [], []
    for path in paths:
        try:
            results = json.loads(path.read_text(encoding="utf-8"))["results"]
            of_file = [_training(result) for result in results if result["launches"]]
        except OSError as error:
            troubles.append(f"{path}: cannot be read ({error.strerror}), expected {_EXPECTED}")
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            troubles.append(f"{path}: not a --perf-json file ({plain(error)}), expected {_EXPECTED}")
        else:
            found += of_file
            if not of_file:
                troubles.append(f"{path}: no case of it has a launch, expected {_EXPECTED}")
    return found, troubles


def _training(result: Mapping[str, Any]) -> Training:
    launch = results_launch(result["launches"][0])
    metrics = result["metrics"]
    epochs = launch.evidence.get("epochs")
    return Training(
        case=plain(result["id"]),
        rate=_value(metrics, "tokens_per_second_per_gpu"),
        real_rate=_value(metrics, "real_tokens_per_second_per_gpu"),
        epochs=None if epochs is None else float(epochs),
        on_text="data" in launch.evidence,
        curve=LossInTime.of(launch.losses, launch.ranks[0].step_seconds),
    )


def _value(metrics: Mapping[str, Any], name: str) -> float | None:
    value = metrics.get(name, {}).get("value")
    return None if value is None else float(value)


def text_page(found: Sequence[Training], times: Sequence[float], screen: Screen) -> list[str]:
    """For a terminal."""
    lines = table(_columns(found, times), screen)
    return [*lines, "", *_NOTES, *_random(found), "", lab10.SOURCE, *table(_published(), screen), _PUBLISHED]


def markdown_page(found: Sequence[Training], times: Sequence[float]) -> list[str]:
    """For a document."""
    notes = [f"- {escaped(line)}" for line in (*_NOTES, *_random(found))]
    published = ["", escaped(lab10.SOURCE), "", *markdown(_published()), "", f"- {_PUBLISHED}"]
    return [*markdown(_columns(found, times)), "", *notes, *published]


def csv_page(found: Sequence[Training], times: Sequence[float]) -> list[str]:
    """For programs: ours alone."""
    return comma_separated([_record(one, times) for one in found])


def times_of(found: Sequence[Training], asked: Sequence[float]) -> Sequence[float]:
    """When losses are told: as asked, else by the shortest training."""
    return asked or common_times([one.curve for one in found])


def _record(one: Training, times: Sequence[float]) -> dict[str, object]:
    return {
        "case": one.case,
        "tokens_per_second_per_gpu": one.rate,
        "real_tokens_per_second_per_gpu": one.real_rate,
        "steps": len(one.curve.losses),
        "seconds": one.curve.seconds,
        "epochs": one.epochs,
        **{f"loss_after_{at:g}_s": one.curve.after(at) for at in times},
        "last_loss": one.curve.last,
    }


def _columns(found: Sequence[Training], times: Sequence[float]) -> list[Column]:
    real = [one.real_rate for one in found]
    return [
        Column("case", [one.case for one in found], right=False),
        Column("tokens/s/GPU", [formats.tokens_per_second(one.rate) for one in found]),
        *([Column("real", [formats.tokens_per_second(rate) for rate in real])] if any(real) else []),
        Column("steps", [str(len(one.curve.losses)) for one in found]),
        Column("time", [formats.seconds(one.curve.seconds) for one in found]),
        Column("epochs", [formats.ABSENT if one.epochs is None else f"{one.epochs:.2f}" for one in found]),
        *(Column(f"loss after {at:g} s", [_loss(one.curve.after(at)) for one in found]) for at in times),
        Column("last loss", [_loss(one.curve.last) for one in found]),
    ]


def _random(found: Sequence[Training]) -> list[str]:
    cases = dict.fromkeys(one.case for one in found if not one.on_text)
    return [f"random tokens, of which nothing can be learnt: {', '.join(cases)}; a text: data=text"] if cases else []


def _published() -> list[Column]:
    runs = lab10.RUNS
    return [
        Column("run", [run.name for run in runs], right=False),
        Column("GPUs", [str(run.gpus) for run in runs]),
        Column("batch", [str(run.micro_batch_size) for run in runs]),
        Column("tokens/s/GPU", [formats.tokens_per_second(run.tokens_per_second / run.gpus) for run in runs]),
        Column("time", [formats.seconds(run.seconds) for run in runs]),
        Column("last loss", [f"{run.final_loss:g}" for run in runs]),
    ]


def _loss(value: float | None) -> str:
    return formats.ABSENT if value is None else f"{value:.3f}"
