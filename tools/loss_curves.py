"""False alarms of loss curves, and which faults they tell, from real trainings: docs/explanation/learning.md.

    python -m tools.loss_curves train sound.json --seeds 64                  # llama-tiny on the text that ships
    python -m tools.loss_curves train slow.json --seeds 5 --fault "learning rate -10 %"
    python -m tools.loss_curves train bf16.json --seeds 5 --set mixed_precision=bf16
    python -m tools.loss_curves alarms sound.json --draws 4000
    python -m tools.loss_curves judge slow.json --against sound.json

A file holds the losses of each seed, trained on the CPU. ``train`` goes on with what is there; ``--set`` changes the
spec. ``alarms`` draws two sets of seeds without a common one, as if nothing cancelled any more, and holds the one
against the other as a run does; trainings are drawn again and again, so the draws are not independent. ``judge`` pairs
seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_llmperf.judge.trainings import judge_curve, spans, spreads
from pytest_llmperf.launch.fork_servers import ServerPool
from pytest_llmperf.launch.local import LocalLauncher
from pytest_llmperf.launch.request import LaunchRequest, WarmStart
from pytest_llmperf.records.failure import Failure
from pytest_llmperf.records.result import JudgedCurve
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.worker.import_patch import after_import

SPEC = TrainSpec(
    model="llama-tiny",
    model_precision="fp32",
    mixed_precision="no",
    data="text",
    sequence_length=64,
    micro_batch_size=8,
    steps=100,
    min_steps=100,
)

_ARGUMENTS = """
    prepare = module.TrainingArguments.__post_init__
    def other(self):
        {change}
        prepare(self)
    module.TrainingArguments.__post_init__ = other"""

#: By name, the module and what is changed of it once it was imported.
FAULTS: Mapping[str, tuple[str, str]] = {
    "learning rate -10 %": ("transformers.training_args", _ARGUMENTS.format(change="self.learning_rate *= 0.9")),
    "learning rate +10 %": ("transformers.training_args", _ARGUMENTS.format(change="self.learning_rate *= 1.1")),
    "learning rate -3 %": ("transformers.training_args", _ARGUMENTS.format(change="self.learning_rate *= 0.97")),
    "not clipped": ("transformers.training_args", _ARGUMENTS.format(change="self.max_grad_norm = 0.0")),
    "no causal mask": (
        "transformers.models.llama.modeling_llama",
        """
    attend = module.ALL_ATTENTION_FUNCTIONS["sdpa"]
    def everywhere(owner, query, key, value, attention_mask, **kwargs):
        kwargs["is_causal"] = False
        return attend(owner, query, key, value, None, **kwargs)
    module.ALL_ATTENTION_FUNCTIONS["sdpa"] = everywhere""",
    ),
    "labels leak": (
        "transformers.trainer",
        """
    prepare = module.Trainer._prepare_inputs
    def leaking(self, inputs):
        inputs = prepare(self, inputs)
        inputs["labels"] = inputs["labels"].roll(1, 1)
        return inputs
    module.Trainer._prepare_inputs = leaking""",
    ),
    "a batch seen twice": (
        "transformers.trainer",
        """
    prepare = module.Trainer._prepare_inputs
    def twice(self, inputs):
        self.twice = 1 - getattr(self, "twice", 0)
        if self.twice:
            self.kept = inputs
        return prepare(self, self.kept)
    module.Trainer._prepare_inputs = twice""",
    ),
}


def train(arguments: argparse.Namespace) -> None:
    """Write the losses of each seed as soon as they are known."""
    spec, found = _spec(arguments.set), _read(arguments.file) if arguments.file.exists() else {}
    home = Path(tempfile.mkdtemp(prefix="loss-curves-"))
    if arguments.fault:
        module, patch = FAULTS[arguments.fault]
        (home / "sitecustomize.py").write_text(after_import(module, patch), encoding="utf-8")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(home), os.environ.get("PYTHONPATH", "")]))
    pool = ServerPool(lambda: home)
    try:
        for seed in range(spec.seed, spec.seed + arguments.seeds):
            if seed in found:
                continue
            request = LaunchRequest(
                spec=replace(spec, seed=seed),
                folder=home / f"seed-{seed}",
                gpus=(),
                timeout_seconds=600.0,
                trace=False,
                warm=WarmStart(pool, _refuse, is_required=True),
            )
            outcome = LocalLauncher().launch(request, lambda _: None)
            if isinstance(outcome, Failure):
                raise SystemExit("\n".join((outcome.reason, *outcome.tail)))
            found[seed] = outcome.losses
            arguments.file.write_text(json.dumps(found), encoding="utf-8")
            print(f"seed {seed}: {outcome.losses[0]:.4f} to {outcome.losses[-1]:.4f}", flush=True)
    finally:
        pool.close()


def alarms(arguments: argparse.Namespace) -> None:
    """What a case is told of whose pairs share nothing."""
    curves, draw = list(_read(arguments.file).values()), random.Random(1)  # noqa: S311 - to be drawn again
    _tell_spread(curves)
    words: Counter[str] = Counter()
    for _ in range(arguments.draws):
        chosen = draw.sample(curves, 2 * arguments.seeds)
        now, then = (dict(enumerate(half)) for half in (chosen[: arguments.seeds], chosen[arguments.seeds :]))
        words[judged(now, then).verdict] += 1
    told = ", ".join(f"{word} {number}" for word, number in words.most_common())
    print(f"{arguments.draws} draws of {arguments.seeds} seeds from {len(curves)} trainings: {told}")


def judge(arguments: argparse.Namespace) -> None:
    """One file's trainings beside another's of the same seeds, from each seed on."""
    now, then = _read(arguments.file), _read(arguments.against)
    then = {seed: then[seed] for seed in now}
    apart = [
        abs(sum(now[seed][span.first - 1 : span.last]) / sum(then[seed][span.first - 1 : span.last]) - 1)
        for seed in now
        for span in spans(len(now[seed]))
    ]
    print(f"parts of one seed are apart by {max(apart):.4%} at most")
    seeds = list(then)[: arguments.seeds]
    told = judged(now, {seed: then[seed] for seed in seeds})
    print(f"{told.verdict} by {len(told.seeds)}: {told.reason}")
    for part in told.parts:
        seen = "" if part.seen is None else f", {part.seen:.4f} would be told"
        print(
            f"  steps {part.first} to {part.last}: {part.stored:.4f} -> {part.loss:.4f}, {part.nothing:.4f} is nothing"
            + seen
        )


def judged(now: Mapping[int, Sequence[float]], then: Mapping[int, Sequence[float]]) -> JudgedCurve:
    """As a run does: one seed after the other, until it is decided."""
    trained: dict[int, Sequence[float]] = {}
    told: list[JudgedCurve] = []
    for seed in then:
        trained[seed] = now[seed]
        told.append(judge_curve(trained, then))
        if told[-1].verdict != "undecided":
            break
    return told[-1]


def _tell_spread(curves: Sequence[Sequence[float]]) -> None:
    for span, spread in zip(spans(len(curves[0])), spreads(curves), strict=True):
        share, nothing = spread.sd / spread.mean, spread.nothing / spread.mean
        print(
            f"steps {span.first} to {span.last}: mean {spread.mean:.4f}, sd {spread.sd:.4f} ({share:.2%}), "
            f"up to {nothing:.2%} is nothing"
        )


def _spec(settings: Sequence[str]) -> TrainSpec:
    changes: dict[str, Any] = dict(setting.split("=", 1) for setting in settings)
    usual = SPEC.to_dict()
    values = {name: int(text) if isinstance(usual[name], int) else text for name, text in changes.items()}
    return TrainSpec.from_dict({**usual, **values})


def _read(path: Path) -> dict[int, Sequence[float]]:
    return {int(seed): losses for seed, losses in json.loads(path.read_text(encoding="utf-8")).items()}


def _refuse(line: str) -> None:
    raise SystemExit(line)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for command in (train, alarms, judge):
        one = commands.add_parser(command.__name__, help=command.__doc__)
        one.add_argument("file", type=Path)
        one.add_argument("--seeds", type=int, default=5)
        one.set_defaults(command=command)
        if command is train:
            one.add_argument("--fault", choices=FAULTS)
            one.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE")
        elif command is alarms:
            one.add_argument("--draws", type=int, default=4000)
        else:
            one.add_argument("--against", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.command(arguments)


if __name__ == "__main__":
    main()
