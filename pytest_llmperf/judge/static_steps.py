"""Static steps, where they are stored, and each held against its stored one: exact by one version (decision 30)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from typing import Any

from pytest_llmperf.judge.baseline import ANY_MACHINE, Baseline, BaselineStore, StepBaseline, StoredStep
from pytest_llmperf.judge.store import BaselineChangedError, BaselineError, Document, Store, not_in_git, read
from pytest_llmperf.judge.verdict import Judgement
from pytest_llmperf.records.metrics import METRICS, label
from pytest_llmperf.records.result import CaseResult, Check, Verdict, worst_of
from pytest_llmperf.records.trace import StaticStep, new_places
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.support.files import file_name
from pytest_llmperf.support.formats import change_of, first_n


@dataclass(frozen=True)
class Place:
    """A file that keeps static figures of a case, or may."""

    machine: str
    """Its machine kind, or ``ANY_MACHINE``."""
    stored: StoredStep | None = None
    baseline: Baseline | None = None
    """Of the launches that are stored there too."""
    alone: StepBaseline | None = None

    @property
    def kind(self) -> str:
        """Empty where it is of no machine's."""
        return "" if self.machine == ANY_MACHINE else self.machine


#: Where figures go that no file keeps yet.
ANYWHERE = Place(ANY_MACHINE)


class StepStore:
    """Where static figures are: in the baselines of each machine kind, or in ``<root>/static/<spec id>.json``."""

    def __init__(self, root: Path, machine: str = "", recorded_by: str = "", *, on_cpu: bool = False) -> None:
        """``machine``: the only kind looked at, if named; ``recorded_by`` and ``on_cpu`` are told of a new file."""
        self._recorded_by, self._on_cpu = recorded_by, on_cpu
        self._machine, self._baselines, self._alone = machine, BaselineStore(root), Store(root, StepBaseline)

    def places(self, spec: Spec) -> list[Place]:
        """Those that are there, the machine kinds' first; BaselineError: one of them cannot serve."""
        kinds = [self._machine] if self._machine else self._baselines.machines()
        found = ((kind, self._baselines.load(kind, spec)) for kind in kinds)
        places = [Place(kind, baseline.static, baseline) for kind, baseline in found if baseline is not None]
        alone = self._alone.load(ANY_MACHINE, spec)
        return [*places, *([Place(ANY_MACHINE, alone.static, alone=alone)] if alone else [])]

    def settings(self, case: str) -> Mapping[str, Any] | None:
        """Of the spec with this id, where it has a file of its own; BaselineError: a file that cannot be read."""
        alone = read(self._alone.root / ANY_MACHINE / f"{file_name(case)}.json", StepBaseline)
        return alone.spec if alone else None

    def record(self, places: Sequence[Place], spec: Spec, step: StaticStep, reason: str, revision: str) -> None:
        """Keep ``step`` at ``places``; BaselineError: another run changed one, or it cannot be written."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        new = StoredStep(step=step, recorded_at=now, reason=reason, revision=revision)
        for place in places:
            self._keep(place, spec, new)

    def _keep(self, place: Place, spec: Spec, new: StoredStep) -> None:

        def change(old: Baseline | None) -> Baseline:
            if old is None or old.static != place.stored:
                raise BaselineChangedError(place.baseline.id if place.baseline else "", old)
            return replace(old, static=new)

        if place.machine != ANY_MACHINE:
            self._baselines.update(place.machine, spec, change)
            return
        case: dict[str, Any] = {"id": spec.id, "digest": spec.digest, "spec": spec.to_dict()}
        alone = StepBaseline(**case, recorded_by=self._recorded_by, static=new, on_cpu=self._on_cpu)
        self._alone.replace(spec, place.alone, alone)


def entries_of_run(root: Path, machine: str, *, on_cpu: bool, is_static: bool = False) -> dict[Path, Document]:
    """Every file that a run on ``machine`` may ask for: of the machine kind, and of none where its cases are for the
    CPU or GPUs as the run's are. ``is_static``: a run without launches; BaselineError: a file that cannot be read."""
    found = {} if is_static else BaselineStore(root).entries(machine)
    for path in sorted((root / ANY_MACHINE).glob("*.json")):
        one = read(path, StepBaseline)
        found |= {path: one} if one is not None and one.on_cpu == on_cpu else {}
    return found


_COPIES = frozenset({"aten::_to_copy", "aten::copy_", "aten::clone", "aten::_foreach_copy_"})
_WAITS = frozenset({"aten::item", "aten::is_nonzero", "aten::nonzero", "aten::_local_scalar_dense"})

# What computes nothing points to nothing, and is told last.
_WORKLESS = frozenset(
    f"aten::{name}"
    for name in (
        "_unsafe_view alias as_strided detach empty empty_like empty_strided expand lift_fresh new_empty permute "
        "select slice squeeze t transpose unsqueeze view"
    ).split()
)

PEAK = "predicted_peak_bytes"
_MOST_NAMES = 4


def _among(names: frozenset[str]) -> Callable[[StaticStep], Mapping[str, float]]:
    return lambda step: {name: count for name, count in step.operators.items() if name in names}


def _exchanged(place: int) -> Callable[[StaticStep], Mapping[str, float]]:
    return lambda step: {name: each[place] for name, each in step.exchanges.items()}


def _asking(step: StaticStep) -> Mapping[str, float]:
    """Operators by which a script asks for exchanges; of a predicted step, whose FLOPs are known, they count as any."""
    return {name: count for name, count in step.operators.items() if name.startswith("c10d::") and not step.flops}


def _others(step: StaticStep) -> Mapping[str, float]:
    known = {*_COPIES, *_WAITS, *_asking(step)}
    return {name: count for name, count in step.operators.items() if name not in known}


# In the order in which they are told: how each is counted, and the verdicts on more and on fewer. Less arithmetic may
# be a layer that is lost: nobody calls it a gain unseen.
_FIGURES: Mapping[str, tuple[Callable[[StaticStep], Mapping[str, float]], Verdict, Verdict]] = {
    "synchronisations_per_step": (_among(_WAITS), "regressed", "changed"),
    "copies_per_step": (_among(_COPIES), "regressed", "changed"),
    "collectives_per_step": (lambda step: _exchanged(0)(step) or _asking(step), "regressed", "changed"),
    "collective_bytes_per_step": (_exchanged(1), "regressed", "changed"),
    "flops_per_step": (lambda step: step.flops, "regressed", "changed"),
    PEAK: (lambda step: step.memory, "regressed", "improved"),
    "operators_per_step": (_others, "changed", "changed"),
}
# What a kind of step does not have is not told of it: a script's no arithmetic, one rank's no collectives.
_OF_SOME = ("collectives_per_step", "collective_bytes_per_step", "flops_per_step", PEAK)


def _told(*steps: StaticStep) -> list[str]:
    return [name for name, (count, *_) in _FIGURES.items() if name not in _OF_SOME or any(map(count, steps))]


def judge_step(now: StaticStep, stored: StaticStep | None) -> Judgement:
    if stored is None:
        figures = ((METRICS[name], fsum(_FIGURES[name][0](now).values())) for name in _told(now))
        checks = tuple(metric.check(value, tolerance=0.0, verdict="new") for metric, value in figures)
        return Judgement("new", "no static figures yet", checks)
    if not (now.exchanges and stored.exchanges):  # older figures tell of none
        now, stored = (replace(step, exchanges={}) for step in (now, stored))
    others = stored.other_versions(now)
    checks = tuple(_check(name, now, stored, gates=not others) for name in _told(now, stored))
    if others:
        moved = news(now, stored)
        versions = f"other versions ({', '.join(others)})"
        if not moved:
            return Judgement("pass", f"the same step with {versions}", checks)
        return Judgement("changed", f"{versions}: {moved}", checks)
    verdict = worst_of(check.verdict for check in checks)
    if verdict == "pass":
        return Judgement(verdict, "the same step", checks)
    return Judgement(verdict, ", ".join(_sentence(check) for check in checks if check.verdict == verdict), checks)


def news(now: StaticStep, stored: StaticStep) -> str:
    """What moved, in one line: ``+32 aten::_to_copy a step, memory +0.40 GiB``; empty where nothing did."""
    lines = _moved(now.operators, stored.operators, "")
    words = [f"{first_n(lines, _MOST_NAMES)} a step"] if lines else []
    for name in _OF_SOME:
        then, there = (fsum(_FIGURES[name][0](step).values()) for step in (stored, now))
        if then != there:
            words.append(f"{label(name)} {change_of(there - then, METRICS[name].unit)}")
    return ", ".join(words)


def come_and_gone(step: StaticStep, stored: StaticStep) -> str:
    """What points to the cause: operators that are called anew or no more, and lines of Python that wait or copy."""
    mine, theirs = step.operators, stored.operators
    lines = list[str]()
    for word, there, other in (("gone:", theirs, mine), ("new:", mine, theirs)):
        if names := sorted({*there} - {*other}, key=lambda name: (name in _WORKLESS, -there[name], name)):
            told = [f"{name} ({there[name]} a step)" for name in names]
            lines.append(f"{word} {first_n(told, _MOST_NAMES)}")
    for metric in ("synchronisations_per_step", "copies_per_step", "collectives_per_step"):
        lines += new_places(metric, stored, step)[:_MOST_NAMES]
    return "; ".join(lines)


def _check(name: str, now: StaticStep, stored: StaticStep, *, gates: bool) -> Check:
    count, more, fewer = _FIGURES[name]
    mine, theirs, unit = count(now), count(stored), METRICS[name].unit
    value, baseline = fsum(mine.values()), fsum(theirs.values())
    # Of memory the peak decides: its parts take turns in being there.
    is_same = value == baseline if unit == "bytes" else mine == theirs
    verdict: Verdict = "pass" if is_same else "changed"
    if value != baseline:
        verdict = more if value > baseline else fewer
    held = {"tolerance": 0.0, "limit": baseline, "verdict": verdict} if gates else {}
    detail = "" if is_same else first_n(_moved(mine, theirs, unit), 8)
    return METRICS[name].check(value, baseline, **held, detail=detail)


def _moved(now: Mapping[str, float], then: Mapping[str, float], unit: str) -> list[str]:
    apart = {name: now.get(name, 0) - then.get(name, 0) for name in {*now, *then}}
    moved = sorted((-abs(change), name, change) for name, change in apart.items() if change)
    if unit in ("", "1"):
        return [f"{change:+.6g} {name}" for _, name, change in moved]
    return [f"{name} {change_of(change, unit)}" for _, name, change in moved]


def _sentence(check: Check) -> str:
    change = check.value - (check.baseline or 0.0)
    by = f" {change_of(change, check.unit)}" if change else ""
    return f"{label(check.metric)}{by} ({check.detail})" if check.detail else f"{label(check.metric)}{by}"


# Acceptance of static figures: by the rules of other figures, only a reason replaces what moved.


def refuse_unexplained(case: str, result: CaseResult, changed: Sequence[str]) -> None:
    """BaselineError: ``result`` may not replace a step without a reason. ``changed``: files that are in no commit."""
    if result.verdict in ("regressed", "changed"):
        word = "worse" if result.verdict == "regressed" else "another step"
        raise BaselineError(f'{case}: {word} ({result.reason}); accept it with --perf-reason "why"')
    if changed:
        raise not_in_git(f"{case}: ", changed)
