"""What this process has measured of its cases, in their order; and how well a wide one scales from a narrow one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_llmperf.judge.baseline import Baseline, size_of
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.run_effects import METRIC, Narrow, judge_efficiency
from pytest_llmperf.judge.verdict import Judgement, joined
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.learning import MadeTrainings, ParityOrder, TrainingErrors
from pytest_llmperf.records.metrics import METRICS
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.run.case import Caller
from pytest_llmperf.run.conclusion import Recorder
from pytest_llmperf.settings.spec import Spec, is_narrower

# What spoils a calibration once may be over; what does so twice stays.
_CALIBRATION_TRIES = 2


@dataclass(frozen=True)
class Measured:
    """One case that this run has judged, or planned."""

    spec: Spec
    result: CaseResult
    baseline: Baseline | None
    refused: str = ""
    """Why it was not recorded, where the run asked for that."""
    again: bool = False
    """Whether the test is run again: these launches are told of by nobody else."""

    @property
    def nodeid(self) -> str:
        return self.result.shares or self.result.nodeid

    @property
    def held_against(self) -> str:
        return size_of(self.baseline) if self.baseline else "none"

    def lent(self, result: CaseResult) -> tuple[CaseResult, str]:
        """``result``, of a test that has these launches too; as recorded, if they were, and why not, if refused."""
        # What one test was allowed to record excuses no other verdict: that test has markers of its own.
        updated = self.result.updated if result.verdict == self.result.verdict else ""
        if self.again and result.nodeid == self.nodeid:
            return replace(result, updated=updated), self.refused
        shared, alone = len(self.result.launches), len(self.result.launches) == len(result.launches)
        whose = "its launches are those of" if alone else f"{shared} of its {len(result.launches)} launches made by"
        result = replace(
            result,
            updated=updated,
            notes=(*result.notes, f"{whose} {self.nodeid}"),
            shares=self.nodeid if alone else "",
            shared_launches=shared,
        )
        return result, self.refused


class ResultCache:
    def __init__(self) -> None:
        self._measured: list[Measured] = []
        # What a small training of one case did serves every other case that asks for the same.
        self.true_trainings: dict[tuple[str, ParityOrder], MadeTrainings] = {}
        self.training_errors: dict[tuple[str, str], tuple[TrainingErrors, ...]] = {}

    def add(self, measured: Measured) -> None:
        """Keep it, but for what cannot be trusted."""
        if measured.result.verdict != "invalid":
            self._measured.append(measured)

    @property
    def launches(self) -> list[Launch]:
        """The launches of all that were judged, each once."""
        return list({id(launch): launch for one in self._measured for launch in one.result.launches}.values())

    def begin_again(self, nodeid: str) -> None:
        """The test is run once more: what it has measured is pooled with what it will, and is its own."""
        self._measured = [replace(one, again=one.again or one.nodeid == nodeid) for one in self._measured]

    def same(self, spec: Spec) -> Measured | None:
        return next((one for one in reversed(self._measured) if one.spec == spec), None)

    def narrow(self, wide: Spec, scaled_from: Spec | None) -> Narrow | None:
        """The narrowest of the series of ``wide``, or ``scaled_from``, as this run measured it."""

        def serves(spec: Spec) -> bool:
            return spec.digest == scaled_from.digest if scaled_from else is_narrower(spec, wide)

        if not (found := [one for one in reversed(self._measured) if one.result.launches and serves(one.spec)]):
            return None
        best = min(found, key=lambda one: one.spec.gpus)
        return Narrow(gpus=best.spec.gpus, launches=best.result.launches, baseline=best.baseline, in_this_run=True)


def calibrates(caller: Caller, made: Sequence[Launch], gpus: Sequence[Gpu]) -> bool:
    """Unless launches of the run, or those ``made``, have tried in vain on one of ``gpus``: no third is worth it."""
    if caller.run.on_cpu or not caller.run.settings.calibration:
        return False
    ranks = (rank for launch in (*caller.run.result_cache.launches, *made) for rank in launch.ranks)
    tries = Counter(rank.place.device for rank in ranks if rank.calibration and rank.calibration.trouble)
    spent = [device for device, count in tries.items() if count >= _CALIBRATION_TRIES]
    if not gpus:  # srun chooses them, and may choose these
        return not spent
    return not any(gpu.uuid.removeprefix("GPU-") in device for gpu in gpus for device in spent)


@dataclass(frozen=True)
class Scaling:
    """How well one wide case scales, held against the narrowest of its series."""

    caller: Caller
    policy: Policy
    narrow: Narrow | None

    @classmethod
    def of(cls, caller: Caller, recorder: Recorder, wide: Spec, scaled_from: Spec | None) -> Scaling | None:
        """Beside the narrowest of the series of ``wide``, or ``scaled_from``: as this run measured it, else as stored.
        Under ``--perf-against`` no baseline is read. ``None``: one GPU scales nothing."""
        if wide.gpus == 1:
            return None
        narrow = caller.run.result_cache.narrow(wide, scaled_from)
        candidates = [scaled_from] if scaled_from else wide.narrower()
        for spec in [] if caller.run.settings.against else candidates:
            if narrow is None and (stored := recorder.find(spec)) is not None:
                narrow = Narrow(gpus=spec.gpus, launches=stored.launches, baseline=stored, in_this_run=False)
        return cls(caller, caller.policy(wide), narrow)

    def joined(self, judgement: Judgement, launches: Sequence[Launch], baseline: Baseline | None) -> Judgement:
        """``judgement`` against ``baseline`` with what more GPUs brought; of launches in trouble nothing."""
        if judgement.verdict == "invalid":
            return judgement
        batch = METRICS["global_batch_tokens"].check(float(launches[0].tokens_per_step))
        if self.narrow is None:
            # What a case does by itself on other hosts excuses no floor that was not held.
            held = (replace(check, by_itself=None) if self.unheld else check for check in judgement.checks)
            judgement = replace(judgement, checks=(*held, batch))
            is_unheld = bool(self.unheld) and judgement.verdict in ("pass", "improved", "changed")
            return replace(judgement, verdict="inconclusive", reason=self.unheld) if is_unheld else judgement
        found = judge_efficiency(launches, baseline, self.narrow, self.policy, self.caller.terms.efficiency)
        widening = len(launches[0].ranks) / self.narrow.gpus
        speed_up = METRICS["speed_up"].check(found.check.value * widening, detail=f"over {self.narrow.name}")
        return joined(judgement, (found.check, speed_up, batch), undecided=found.undecided)

    @property
    def unheld(self) -> str:
        """Why its floor could not be held; empty where it could, or where there is none."""
        if self.narrow is not None or self.caller.terms.efficiency.at_least is None:
            return ""
        stored = ", and --perf-against reads no baseline" if self.caller.run.settings.against else " or is stored"
        return f"{METRIC}: no narrower width was measured in this run{stored}, so its floor was not held"
