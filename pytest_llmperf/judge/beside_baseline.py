"""A case beside its baseline: what counts, growth, phases and losses say of its launches together; and notes. Pure."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_llmperf.judge import validity
from pytest_llmperf.judge.acceptance import FAR_APART, creep, nearest_line
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.exact import changed_evidence, count_checks, told_changes, trace_notes
from pytest_llmperf.judge.policy import Policy, StoredOfKind
from pytest_llmperf.judge.repeats import changed_gradients, first_loss_checks
from pytest_llmperf.judge.verdict import NOTED, Judgement, growth_checks, horizon, joined, judge, phase_checks
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.metrics import MEMORY, METRICS, RATE
from pytest_llmperf.records.result import USUAL, CaseResult, Check
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.support.formats import memory, seconds

#: Of a case whose speed stays undecided.
ONE_SESSION = (
    "its baseline knows one session: record it again on a second night (--update-baselines), best on another host, and "
    "a loss of 5 % is seen"
)

#: Of a script that was recorded as repeatable, and is not.
LEARN_ANEW = (
    "losses and all else that its recordings had in common are other, of the same command, files and versions: this "
    'script is not as repeatable as they were; learn it anew with --update-baselines --perf-reason "why"'
)

# Of a step: from here on they are worth a note.
_MOST_STALLED, _NOTABLE_WAIT = 0.01, 0.05
_MOST_DIFFERENT = 2


@dataclass(frozen=True)
class BesideBaseline:
    """Launches of one spec, and what they are held against."""

    spec: Spec
    launches: tuple[Launch, ...]
    baseline: Baseline | None
    policy: Policy
    stored: StoredOfKind

    @property
    def _explained(self) -> Sequence[Launch]:
        return self.baseline.explained if self.baseline else ()

    @staticmethod
    def is_usable(launches: Sequence[Launch]) -> bool:
        return not any(True for launch in launches for _ in validity.unusable(launch))

    def circumstances(self, launch: Launch, *, on_cpu: bool, named: Container[str]) -> validity.Circumstances:
        """Of one more; ``named``: metrics whose tolerances somebody named."""
        is_figure = self.is_usable([launch])
        policy = self.policy.at([launch], self.baseline) if self.baseline and is_figure else self.policy
        # Where throughput gates nothing, drift spoils nothing; nor does a CPU's, unless somebody named its tolerance.
        tolerance = math.inf if on_cpu and RATE not in named else policy.speed_tolerance
        if self.spec.is_script and self.baseline:  # nor does what its recordings did as well
            tolerance = max(tolerance, *(2 * abs(each.steady.drift) for each in self.baseline.launches))
        return validity.circumstances(launch, tolerance, self.stored.experience)

    def troubles(self, inactive: frozenset[str]) -> tuple[str, ...]:
        found = validity.all_troubles(self.spec, self.launches, inactive, self._explained)
        if not validity.holds_learning(inactive):
            return found
        return (*found, *changed_gradients(self.launches, self._explained))

    def judgement(self, troubles: Sequence[str], extra: Sequence[Check]) -> Judgement:
        judgement = judge(self.launches, self.baseline, self.policy, troubles, extra)
        if judgement.verdict == "invalid":
            return judgement
        growth = growth_checks(self.launches, self._explained, self.policy.rule.budget)
        phases = phase_checks(self.launches, self.baseline, self.policy)
        losses = first_loss_checks(self.launches, self._explained, self.spec.passes_per_step)
        undecided = phases.undecided or any(check.verdict == "inconclusive" for check in growth)
        return joined(judgement, (*self._counts(), *growth, *losses, *phases.checks), undecided=undecided)

    def _counts(self) -> tuple[Check, ...]:
        """What a step is made of; of a script that repeats nothing of its recordings they show nothing."""
        repeats = self.baseline.repeats if self.baseline else None
        checks = count_checks(self.launches, self.baseline.trace if self.baseline else None, repeats)
        other = [check for check in checks if check.verdict in ("regressed", "changed")]
        how = dict[str, Any](verdict="inconclusive")
        if not other_steps(self.launches, self.baseline):
            if not repeats or not repeats.is_chance(self.launches, self._explained, are_counts_other=bool(other)):
                return checks
            # A file that no rank imports may have set it up otherwise.
            if changed_evidence(self.launches, self._explained):
                return checks
            how["detail"] = LEARN_ANEW
        return tuple(replace(check, **how) if check in other else check for check in checks)

    def disagreement(self, launches: Sequence[Launch]) -> str:
        """Where ``launches``, its own or stored ones, are too far apart for one of them to be right."""
        return self.policy.disagreement(launches) if self.is_usable(launches) else ""

    def with_changes(self, result: CaseResult, node: str) -> CaseResult:
        """``result`` with what is not as in the baseline; of a first one with the nearest case of its test ``node``."""
        if self.baseline is None:
            is_new = result.verdict == "new"
            near = nearest_line(self.spec, node, self.stored.baselines, result.checks) if is_new else ""
            return replace(result, reason="; ".join(filter(None, [result.reason, near])))
        # What nobody may accept without a reason, though it passes.
        crept = creep(self.baseline, result.checks, self.launches, self.policy.noise)
        changed = told_changes(self.launches, self.baseline.explained, self.baseline.repeats, *crept)
        return replace(result, changed=changed, differences=self.baseline.launches[-1].differences(self.launches[-1]))

    def of_judgement(self, judgement: Judgement, *, on_cpu: bool) -> Iterator[str]:
        """What its checks leave to be told beside it."""
        told = dict.fromkeys(one.detail for one in judgement.checks)
        yield from (each for each in told if each in (*NOTED, LEARN_ANEW) or each.startswith(validity.TAKEN))
        # Whether another session of the baseline would have helped its speed to decide; on a CPU that is noise.
        is_open = any(check.metric == RATE and check.verdict == "inconclusive" for check in judgement.checks)
        if self.baseline is not None and is_open and self.baseline.sessions == 1 and not on_cpu:
            yield ONE_SESSION

    def of_compilation(self) -> Iterator[str]:
        """Of a first recording: else a change is told as such."""
        if self.baseline is None and self.launches[-1].seen.compilation.torch_compile:
            for row in METRICS.values():
                count = max(launch.evidence.get(row.evidence, 0) for launch in self.launches) if row.note else 0
                if count:
                    yield f"torch_compile {row.note} {count} time(s)"

    def of_rules(self) -> Iterator[str]:
        """What else of its judging a reader should know: phases of one launch, what was seen, wider tolerances."""
        yield from phase_checks(self.launches, self.baseline, self.policy).notes
        yield from seen_notes(self.launches, self.baseline)
        said = self.baseline.spec if self.baseline else {}
        for name, metric in (("throughput_tolerance", RATE), ("memory_tolerance", MEMORY)):
            then, now = said.get(name) or self.stored.usual.tolerances[metric], getattr(self.spec, name) or 0.0
            if self.baseline and now > then:
                yield f"{name} is {now * 100:g} % here, was {then * 100:g} % when its baseline was recorded"


def steps_notes(
    launches: Sequence[Launch], baseline: Baseline | None, policy: Policy, wait: tuple[float, float] | None
) -> Iterator[str]:
    """How the steps of ``launches`` went, as far as that is no news of a change; ``wait`` for data: seconds, share."""
    if seen := horizon(launches)[1]:  # no launch took all its steps
        yield f"{seen}: stalls, drift and growth of memory that come later are not judged"
    slow, fast = (edge((one.median_step_seconds for one in launches), default=1.0) for edge in (max, min))
    if slow > FAR_APART * fast:
        yield f"its launches are {slow / fast:.1f} times apart: steps of {seconds(fast)} and of {seconds(slow)}"
    was_bimodal = baseline and any(launch.steady.bimodal for launch in baseline.launches)
    if any(launch.steady.bimodal for launch in launches) and not was_bimodal:
        yield f"step times are bimodal (noise or a periodic task); {USUAL}"
    stalls = max((launch.steady.stalls for launch in launches), default=0.0)
    if stalls > _MOST_STALLED:
        yield f"slow steps lost {stalls * 100:.1f} % of a launch; the median leaves them out"
    if wait and wait[1] >= _NOTABLE_WAIT:
        yield f"waits for data: {wait[0] * 1000:.3g} ms a step ({wait[1] * 100:.0f} % of it)"
    least, most = (choose(launch.peak_reserved_bytes for launch in launches) for choose in (min, max))
    if most > least * (1 + policy.tolerances.get(MEMORY, math.inf)):
        yield f"peak memory of its launches: {memory(least, 2)} to {memory(most, 2)}; the leanest counts"


def other_steps(launches: Sequence[Launch], baseline: Baseline | None) -> str:
    """That the steps of a script that were traced are others than in its baseline, where they lie behind others."""
    then, now = (len(those[-1].step_seconds) for those in (baseline.launches if baseline else launches, launches))
    if then == now or not launches[-1].is_script:
        return ""
    told = f"recorded at steps={then}, judged at steps={now}: the traced steps are others, and may log or evaluate"
    return f'{told}; take steps={then}, or accept this with --update-baselines --perf-reason "why"'


def seen_notes(launches: Sequence[Launch], baseline: Baseline | None) -> Iterator[str]:
    """What else was seen: of learning, by libraries, in traces, of faults and calibrations."""
    yield from validity.notes(launches)
    known = (baseline.launches[-1].seen.run.remarks if baseline else None) or ()
    remarks = dict.fromkeys(line for launch in launches for line in launch.seen.run.remarks or ())
    yield from (line for line in remarks if line not in known)
    if launches[-1].is_script:
        told, then = (
            [*validity.disagreements(one.evidence, one.seen)] if one else []
            for one in (launches[-1], baseline.launches[-1] if baseline else None)
        )
        yield from [line for line in told if line not in then][:_MOST_DIFFERENT]
    yield from trace_notes(launches, baseline.trace if baseline else None)
    yield from (f"measured under {fault}" for fault in validity.injected(launches))
    made = (rank.calibration for launch in launches for rank in launch.ranks if rank.calibration)
    troubles = (line for each in made for line in each.trouble.split("; ") if line)
    yield from dict.fromkeys(f"its GPU's calibration is not used: {line}" for line in troubles)
