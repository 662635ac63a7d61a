"""What each method of ``perf`` needs of what it is given; a ``CaseFailedError``, in one line, where that is not so."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

from pytest_llmperf.run.findings import CaseFailedError
from pytest_llmperf.settings.data import OF_A_TEXT
from pytest_llmperf.settings.optimizer import learnt_by
from pytest_llmperf.settings.space import Space, axes_of
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.settings.train_spec import SpecError, TrainSpec

# What a wider case may have otherwise than the narrow one that it is scaled from. One GPU has nothing to shard.
_OF_THE_WIDTH = ("gpus", "parallelism", "micro_batch_size", "gradient_accumulation_steps")


def a_spec(method: str, value: object, kind: type[Any]) -> None:
    if not isinstance(value, kind):
        name = "TrainSpec" if kind is TrainSpec or not isinstance(value, Spec) else kind.__name__
        raise CaseFailedError(f"perf.{method} needs a {name}, not {value!r}; the fixture train_spec makes one")


def a_narrower_training(wide: Spec, scaled_from: Spec) -> None:
    """How fewer GPUs share the work may differ."""
    if type(scaled_from) is not type(wide):
        raise CaseFailedError(f"perf.check: scaled_from={scaled_from.id} is no training as {wide.id} is")
    if scaled_from.gpus >= wide.gpus:
        raise CaseFailedError(f"perf.check: scaled_from={scaled_from.id} has no fewer GPUs than {wide.id}")
    for f in fields(cast("Any", wide)):
        a, b = getattr(wide, f.name), getattr(scaled_from, f.name)
        if a != b and f.metadata.get("work", True) and f.name not in _OF_THE_WIDTH:
            raise CaseFailedError(
                f"perf.check: {wide.id} has {f.name}={a}, expected that of scaled_from={scaled_from.id}, {b}"
            )


def sizes(spec: Spec) -> None:
    """Its training is told its micro-batch, or a search would launch one size again and again."""
    if spec.is_script and "{micro_batch_size}" not in spec.to_dict()["command"]:
        raise CaseFailedError(
            f"perf.max_micro_batch: the command of {spec.id} has no {{micro_batch_size}}, expected it where the script "
            "takes its size, e.g. 'python train.py --batch-size {micro_batch_size}'"
        )


def nats(loss_within: object) -> None:
    """A bound of losses is a positive number, or none; a ratio's bounds are refused where they are made."""
    from pytest_llmperf.judge.pairs import Bounds

    try:
        Bounds(at_most=cast("float | None", loss_within))
    except ValueError:
        wrong = f"perf.compare: loss_within={loss_within!r} must be a positive number of nats, e.g. 0.01"
        raise CaseFailedError(wrong) from None


def the_same_tokens(before: Spec, after: Spec) -> None:
    """Losses are comparable where batches are the same, and rank 0, whose losses are kept, has the same share of them.
    How many steps each side takes decides only how many losses there are to compare."""
    if before.is_script or after.is_script:
        raise CaseFailedError("perf.compare: loss_within takes two TrainSpecs: nobody knows what tokens a script takes")
    for name in ("gpus", "sequences_per_step", "sequence_length", "seed", "data", *OF_A_TEXT):
        a, b = getattr(before, name), getattr(after, name)
        if a != b:
            raise CaseFailedError(
                f"perf.compare: loss_within needs the same {name} on both sides, and they have {a} and {b}"
            )


def a_space(spec: TrainSpec, over: object, runners_up: object) -> Space:
    """What may change of ``spec``, or the test fails."""
    if not isinstance(runners_up, int) or isinstance(runners_up, bool) or runners_up < 1:
        raise CaseFailedError(f"perf.tune: runners_up={runners_up!r}, expected a whole number of at least 1")
    try:
        space = Space(spec, axes_of(over))
        if any(True for _ in space.neighbours(spec)):
            return space
    except SpecError as error:
        raise CaseFailedError(f"perf.tune: {error}") from None
    why = "".join(f"; {line}" for line in space.no_neighbours(spec))
    raise CaseFailedError(
        f"perf.tune: over={over!r} leaves {spec.id} no neighbour, expected another value that can be{why}"
    )


def the_same_training(a: TrainSpec, b: TrainSpec) -> None:
    """Two that are to learn the same are of one plain form, but for their precision: for how it rounds."""
    for what in ("model", "optimizer", "sequence_length", "seed"):
        one, other = (learnt_by(spec) if what == "optimizer" else getattr(spec, what) for spec in (a, b))
        if one != other:
            raise CaseFailedError(
                f"perf.same_training: {what} of {a.id} is {one}, and of {b.id} {other}; expected the same"
            )
