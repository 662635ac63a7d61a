"""What the frozen tests ask of the package's inside: where that moves, this file follows, and nothing else here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pytest_llmperf import TrainSpec
from pytest_llmperf.cli import main
from pytest_llmperf.judge.baseline import ANY_MACHINE, CAPACITY, Baseline, BaselineStore, CapacityBaseline, StepBaseline
from pytest_llmperf.judge.exact import changes, count_checks
from pytest_llmperf.judge.gpu_knowledge import Knowledge
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.repeats import first_loss_checks
from pytest_llmperf.judge.stats import Experience
from pytest_llmperf.judge.store import Store, parse, text_of
from pytest_llmperf.judge.validity import troubles
from pytest_llmperf.judge.verdict import Judgement, growth_checks, joined, judge
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.registry import small

__all__ = ["main", "replayed", "small", "written_again"]

#: By how much launches are spoilt, to be judged as well.
SLOWER = (0.8, 1.03, 1.1)


def written_again(path: Path, root: Path) -> None:
    """The stored file, read and recorded under ``root`` as a run records its own."""
    text = path.read_text(encoding="utf-8")
    if path.parent.name == ANY_MACHINE:
        step = parse(StepBaseline, text, str(path))
        # A run records today's settings, and old files lack some of them: of these the text alone is held.
        target = root / ANY_MACHINE / f"{step.id}.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(text_of(step), encoding="utf-8")
    elif path.parent.name == CAPACITY:
        capacity = parse(CapacityBaseline, text, str(path))
        Store(root, CapacityBaseline).update(capacity.machine, TrainSpec.from_dict(capacity.spec), lambda _: capacity)
    else:
        baseline = parse(Baseline, text, str(path))
        BaselineStore(root).update(baseline.machine, TrainSpec.from_dict(baseline.spec), lambda _: baseline)


def replayed(root: Path, machine: str) -> Iterator[tuple[str, str, Judgement, tuple[str, ...]]]:
    """Each stored launch, judged against the others of its baseline: as one GPU's, and as all cases tell of that GPU.

    Its case, which launch by which statistic, what was decided, and what is told of it besides.
    """
    baselines = BaselineStore(root).baselines(machine)
    stored = [baseline.launches for baseline in baselines]
    plain = replace(Policy.for_gpu(), noise=Experience.of(stored, Policy.for_gpu().noise).noise)
    knowledge = Knowledge.of(stored)
    assert knowledge
    for baseline in baselines:
        for number, launch in enumerate(baseline.launches, 1):
            others = tuple(each for each in baseline.launches if each is not launch) or baseline.launches
            rest = replace(baseline, launches=others)
            found = [launch if baseline.trace is None else replace(launch, trace=baseline.trace.trace)]
            known = replace(plain, knowledge=knowledge.with_seen(found))
            # As their tests declare it: Liger has no kernels for some families.
            inactive = frozenset[str]() if launch.evidence.get("liger_modules") else frozenset({"liger"})
            wrong = troubles(TrainSpec.from_dict(baseline.spec), launch, inactive)
            noted = (*changes(found, others), *(f"trouble: {line}" for line in wrong))
            for name, policy in (("alone", plain), ("known", known)):
                yield baseline.id, f"{number} {name}", _judged(found, rest, policy), noted
        for times in SLOWER:
            three = [_slower(baseline.launches[-1], times * wobble) for wobble in (1.0, 1.001, 0.999)]
            yield baseline.id, f"{times:g} times", _judged(three, baseline, plain), ()


def _slower(launch: Launch, times: float) -> Launch:
    """The same, each of whose steps took so many times as long, in as much more memory."""
    ranks = [
        replace(
            rank,
            step_seconds=tuple(seconds * times for seconds in rank.step_seconds),
            peak_reserved_bytes=int(rank.peak_reserved_bytes * times),
            peak_allocated_bytes=int(rank.peak_allocated_bytes * times),
        )
        for rank in launch.ranks
    ]
    return replace(launch, ranks=tuple(ranks), train_seconds=launch.train_seconds * times)


def _judged(launches: Sequence[Launch], baseline: Baseline, policy: Policy) -> Judgement:
    spec = TrainSpec.from_dict(baseline.spec)
    judgement = judge(launches, baseline, policy)
    for checks in (
        count_checks(launches, baseline.trace),
        growth_checks(launches, baseline.launches, policy.rule.budget),
        first_loss_checks(launches, baseline.launches, spec.gradient_accumulation_steps),
    ):
        judgement = joined(judgement, checks, undecided=False)
    return judgement
