"""Baseline: the accepted launches of one spec on one machine kind, their history, and their JSON. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_llmperf.judge.agreement import same_figures, same_settings
from pytest_llmperf.judge.document import (
    SCHEMA,
    Accepted,
    BaselineChangedError,
    BaselineError,
    dump,
    parse,
    refusing,
    side_by_side,
)
from pytest_llmperf.judge.figures import figure, percent
from pytest_llmperf.judge.noise import labels
from pytest_llmperf.judge.validity import injected, unusable
from pytest_llmperf.measurement import Launch
from pytest_llmperf.result import Check
from pytest_llmperf.shape import typed
from pytest_llmperf.spec import TrainSpec

# More would only slow reading: what a verdict can see is decided by the first dozen.
_MAX_LAUNCHES = 24

# Launches of another speed or memory that take the place of those that are stored.
_PROVEN_BY = 2


#: Sessions from which on a baseline says how sessions differ.
CALIBRATED_SESSIONS = 3


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What a case is held against."""

    id: str
    digest: str
    machine: str
    spec: Mapping[str, Any]
    recorded_by: str
    """The test that recorded it; for people and for finding unused files, never an identity."""
    launches: tuple[Launch, ...]
    anchor: Accepted
    """The first accepted figures: against them slow creep shows."""
    history: tuple[Accepted, ...]
    """Every acceptance, newest last; the anchor is the first."""

    @property
    def sessions(self) -> int:
        """Different hosts or days that its launches are of: the GPUs of one host on one day know the same air.

        A host that was booted anew is known by its GPUs.
        """
        days = (launch.started_at[:10] for launch in self.launches)
        return len(set(zip(labels(self.launches)["host"], days, strict=True)))

    @property
    def newest(self) -> tuple[Launch, ...]:
        """The launches that were accepted last."""
        return self.launches[-max(1, self.history[-1].launches) :]

    @property
    def explained(self) -> tuple[Launch, ...]:
        """The launches that were accepted with the last reason that was given, and since; all of them without one."""
        last = max((number for number, entry in enumerate(self.history) if entry.reason), default=0)
        return self.launches[-max(1, sum(entry.launches for entry in self.history[last:])) :]

    @property
    def maturity(self) -> str:
        """``provisional``, or ``calibrated`` once three sessions have said how they differ."""
        return "calibrated" if self.sessions >= CALIBRATED_SESSIONS else "provisional"

    def to_json(self) -> str:
        """Sorted and stable; arrays of numbers on one line, environments once each.

        Raises:
            BaselineError: a figure that is not finite, which no reader would take back.
        """
        environments: dict[str, Any] = {}
        launches = []
        for launch in self.launches:
            record = launch.to_dict()
            environment = record.pop("environment")
            key = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:8]
            environments[key] = environment
            launches.append({**record, "environment": key})
        document = {
            "schema": SCHEMA,
            "id": self.id,
            "digest": self.digest,
            "machine": self.machine,
            "spec": dict(self.spec),
            "recorded_by": self.recorded_by,
            "anchor": self.anchor.to_dict(),
            "history": [entry.to_dict() for entry in self.history],
            "environments": environments,
            "launches": launches,
        }
        try:
            return dump(document)
        except ValueError as error:
            raise BaselineError(f"{self.id}: a figure is not finite ({error}); nothing was recorded") from error

    @classmethod
    def from_json(cls, text: str, source: str) -> Baseline:
        """The baseline in ``text``; ``source`` names it in errors.

        Raises:
            BaselineError: empty, truncated, of a newer schema, or not a baseline.
        """
        document = parse(text, source)
        with refusing(source, "a baseline"):
            environments = document["environments"]
            launches = tuple(_launch_of(launch, environments) for launch in document["launches"])
            if not launches or not document["history"]:
                raise ValueError("it holds no launch, or no history")
            if {launch.digest for launch in launches} != {document["digest"]}:
                raise ValueError("its launches are of other settings than its digest")
            same_settings(document)
            for line in (line for launch in launches for line in unusable(launch)):
                raise ValueError(line)
            history = tuple(Accepted.from_dict(entry) for entry in document["history"])
            same_figures(launches, history)
            return cls(
                **{name: document[name] for name in ("id", "digest", "machine", "recorded_by")},
                spec=dict(document["spec"]),
                launches=launches,
                anchor=Accepted.from_dict(document["anchor"]),
                history=history,
            )


def _launch_of(values: object, environments: Mapping[str, Any]) -> Launch:
    record = typed(values, {"environment": "str"}, "a launch")
    return Launch.from_dict({**record, "environment": environments[record["environment"]]})


def accept(  # noqa: PLR0913 - each is a fact of the record, and named
    old: Baseline | None,
    *,
    judged: Baseline | None,
    spec: TrainSpec,
    machine: str,
    launches: Sequence[Launch],
    verdict: str,
    checks: Sequence[Check],
    reason: str,
    recorded_at: str,
    recorded_by: str,
    revision: str = "",
) -> Baseline:
    """The baseline after ``launches`` were accepted.

    ``verdict`` and ``checks`` are what ``judge`` said of ``launches`` against ``judged``. Launches within tolerance
    join those that are there; ones beyond it replace them, since two speeds are not one population. The anchor stays.

    Raises:
        BaselineChangedError: the launches were judged against another baseline than there is by now.
        BaselineError: they are invalid, or worse beyond tolerance without a reason.
    """
    _refuse_unfit(old, judged, spec, launches, verdict)
    if not reason:
        _refuse_unexplained(spec, launches, checks)
    entry = Accepted(
        recorded_at=recorded_at,
        reason=reason,
        launches=len(launches),
        metrics={check.metric: check.value for check in checks},
        revision=revision,
    )
    new = Baseline(
        id=spec.id,
        digest=spec.digest,
        machine=machine,
        spec=spec.to_dict(),
        recorded_by=recorded_by,
        launches=tuple(launches)[-_MAX_LAUNCHES:],
        anchor=entry,
        history=(entry,),
    )
    return new if old is None else _joined(old, new, checks)


def _joined(old: Baseline, new: Baseline, checks: Sequence[Check]) -> Baseline:
    """``old`` with the one acceptance of ``new``."""
    kept = () if _moved(checks) else old.launches
    return replace(
        old,
        spec=new.spec,
        recorded_by=new.recorded_by,
        launches=(*kept, *new.launches)[-_MAX_LAUNCHES:],
        history=(*old.history, *new.history),
    )


def _refuse_unexplained(spec: TrainSpec, launches: Sequence[Launch], checks: Sequence[Check]) -> None:
    """What only a reason makes acceptable."""
    worse = [check for check in checks if _is_beyond(check, worse=True)]
    unproven = [check for check in checks if check.verdict == "inconclusive" and _is_beyond(check, worse=False)]
    alone = [check for check in checks if check.verdict == "improved" and len(launches) < _PROVEN_BY]
    if worse:
        raise BaselineError(
            f'{spec.id}: worse beyond tolerance ({_figures(worse)}); accept it with --perf-reason "why"'
        )
    if unproven:
        raise BaselineError(
            f"{spec.id}: better beyond tolerance, and not proven ({_figures(unproven)}); let --perf-launches 4 tell, "
            'or accept it with --perf-reason "why"'
        )
    if alone:
        raise BaselineError(
            f"{spec.id}: one launch alone replaces no baseline ({_figures(alone)}); let --perf-launches {_PROVEN_BY} "
            'tell, or accept it with --perf-reason "why"'
        )


def _moved(checks: Sequence[Check]) -> list[Check]:
    """The figures that left their tolerance, so that old and new launches are not one population."""
    beyond = [check for check in checks if _is_beyond(check, worse=True) or _is_beyond(check, worse=False)]
    # Memory, stalls and a cold first step say nothing of the median, and efficiency half of it is another width's: what
    # the launches know of days and hosts stays.
    others = ("first_step_seconds", "stall_share", "scaling_efficiency")
    return [check for check in beyond if not check.metric.endswith("_bytes") and check.metric not in others]


def _is_beyond(check: Check, *, worse: bool) -> bool:
    """Whether a gating figure left its tolerance in one direction, be it proven or not."""
    # What was decided stands: a figure below a test's own floor is worse, whichever way it moved.
    if check.verdict != "inconclusive" or check.change is None or check.tolerance is None:
        return check.verdict == ("regressed" if worse else "improved")
    loss = 1 / (1 + check.change) - 1 if check.higher_is_better and check.change > -1 else check.change
    return loss > check.tolerance if worse else 1 / (1 + loss) - 1 > check.tolerance


def _refuse_unfit(
    old: Baseline | None, judged: Baseline | None, spec: TrainSpec, launches: Sequence[Launch], verdict: str
) -> None:
    if not launches:
        raise BaselineError(f"{spec.id}: no launch was measured, there is nothing to record")
    if verdict == "invalid":
        raise BaselineError(f"{spec.id}: an invalid launch is never recorded")
    refuse_injected(spec.id, launches)
    if old != judged:
        raise BaselineChangedError(spec.id, old)


def refuse_injected(name: str, launches: Sequence[Launch]) -> None:
    """A fault that was asked for is nothing to hold a case against.

    Raises:
        BaselineError: ``launches``, of the case ``name``, were measured under one.
    """
    for fault in injected(launches):
        raise BaselineError(f"{name}: measured under {fault}, which is never recorded")


def _figures(checks: Sequence[Check]) -> str:
    """Then and now."""
    return ", ".join(
        f"{check.metric} {'none' if check.baseline is None else figure(check.baseline, check.unit)}"
        f" -> {figure(check.value, check.unit)}"
        for check in checks
    )


def size_of(baseline: Baseline) -> str:
    """``3 launches in 2 sessions, provisional``."""
    launches, sessions = len(baseline.launches), baseline.sessions
    counts = f"{launches} {'launch' if launches == 1 else 'launches'} in {sessions} "
    return f"{counts}{'session' if sessions == 1 else 'sessions'}, {baseline.maturity}"


def creep(baseline: Baseline, checks: Sequence[Check]) -> tuple[str, ...]:
    """A line for each metric that is within tolerance of the baseline and worse than the anchor by more than that."""
    lines = []
    for check in checks:
        anchor = baseline.anchor.metrics.get(check.metric)
        tolerance = check.tolerance
        if not anchor or tolerance is None or check.verdict not in ("pass", "inconclusive") or check.limit is None:
            continue
        # Of a metric that is next to nothing, a multiple is still nothing: what its gate lets through is no creep.
        slack = max(anchor * tolerance, check.limit - (check.baseline or 0.0))
        crept = anchor / check.value - 1 > tolerance if check.higher_is_better else check.value - anchor > slack
        if crept:
            was, now = figure(anchor, check.unit), figure(check.value, check.unit)
            change, since = percent(check.value / anchor - 1), baseline.anchor.recorded_at[:10]
            lines.append(f"creep: {check.metric} {now} is {change} from the anchor's {was} of {since}")
    return tuple(lines)


def describe(old: Baseline | None, new: Baseline) -> list[str]:
    """Old, new and anchor side by side, for people."""

    def figures(entry: Accepted) -> str:
        rate, memory = (
            figure(entry.metrics[name], unit) if name in entry.metrics else "-"
            for name, unit in (("tokens_per_second_per_gpu", "tokens/s/GPU"), ("peak_reserved_bytes", "bytes"))
        )
        return f"{rate:>23}  {memory:>10}"

    before = old.history[-1] if old else None
    return [f"recorded {new.id} ({size_of(new)})", *side_by_side(before, new.history[-1], new.anchor, figures)]
