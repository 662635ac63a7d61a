"""The change that all cases of a run have in common, once what their GPUs are known to do is taken off."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pytest_llmperf.judge.gpu_effects.knowledge import Knowledge, calibrated_places, compared
from pytest_llmperf.judge.gpu_effects.model import cell_variances, design_of
from pytest_llmperf.judge.gpu_effects.panel import Panel
from pytest_llmperf.judge.gpu_effects.prediction import doubted, residuals
from pytest_llmperf.judge.sequential_test import Rule
from pytest_llmperf.judge.stats import quantile
from pytest_llmperf.records.result import Verdict
from pytest_llmperf.support.one_thread import one_thread

# Of fewer cases "all" means nothing.
_FEWEST = 4

#: So many of them have to have moved by like amounts.
MOST = 0.75

# Of the change: a case that lies further from it has not moved so; one that has not moved at all lies all of it away.
_ALIKE = 0.5

# Of both sides together, in the interval that is told.
_INTERVAL = 0.95

# A smaller one is no news: hosts of one kind differ by more in what no factor tells.
_NEWS = 0.005

# As of one case on a GPU that is not known.
_UNCALIBRATED = 0.05

# Before anything is seen a change may be as large as it likes.
_ANY = 1.0


@dataclass(frozen=True)
class CommonChange:
    """By how much all cases are slower."""

    log: float
    error: float
    df: float
    cases: int
    gpus: int
    is_known: bool
    """Whether a calibration, or stored launches of the very GPUs, tell what each of these would have done."""
    is_calibrated: bool
    """Whether calibrations of the same day do."""
    together: float
    """Share of the cases that moved so, by like amounts."""

    def verdict(self, tolerance: float, rule: Rule) -> Verdict:
        """By the rule of a single case: beyond ``tolerance`` and the noise; a loss that is beyond the one is no pass.

        A GPU of which nothing tells may move all cases alike: then no less is gated than GPUs of one kind were ever
        seen apart.
        """
        least = max(tolerance, 0.0 if self.is_known else _UNCALIBRATED)
        beyond = max(math.log1p(least), quantile(1 - rule.alpha, self.df) * self.error)
        if self.together < MOST:
            return "pass"
        if abs(self.log) > beyond:
            return "regressed" if self.log > 0 else "improved"
        return "inconclusive" if self.log > math.log1p(tolerance) else "pass"

    @property
    def ratio(self) -> float:
        """By which fraction steps take longer."""
        return math.expm1(self.log)

    @property
    def interval(self) -> tuple[float, float]:
        """Of the slow-down, 95 %; fractions."""
        wide = quantile((1 + _INTERVAL) / 2, self.df) * self.error
        return math.expm1(self.log - wide), math.expm1(self.log + wide)

    @property
    def is_news(self) -> bool:
        """Whether a change that somebody would look for is likely."""
        return self.together >= MOST and min(map(abs, self.interval)) > _NEWS and self._has_one_sign

    @property
    def _has_one_sign(self) -> bool:
        low, high = self.interval
        return low * high > 0


@one_thread()
def common_change(knowledge: Knowledge) -> CommonChange | None:
    """Of what the run has seen; ``None``: too few cases that are known from before.

    A change is a shift of all of the run's launches, and of no calibration: its estimate is that of generalised least
    squares, beside the effects of all GPUs.
    """
    import numpy as np  # noqa: PLC0415 - only a judged run pays for it

    known = {each.series for each in knowledge.stored}
    seen = [each for each in knowledge.seen if each.series in known]
    launched = [each for each in seen if not each.is_calibration]
    cases = {each.series for each in launched}
    if len(cases) < _FEWEST:
        return None
    model, panel = knowledge.model, Panel(knowledge.stored, seen)
    shifted = panel.may_have_changed
    design = np.column_stack([design_of(model, panel), shifted])
    prior = np.zeros((design.shape[1],) * 2)
    prior[:-1, :-1], prior[-1, -1] = model.covariance(panel.units), _ANY**2
    variances = cell_variances(model, panel)
    found = doubted(panel, design, prior, variances)
    left = residuals(panel, design, found)
    log = float(found.means[-1])
    places = {(device, each.unit.day) for each in launched for device in each.unit.devices}
    devices = {device for device, _ in places}
    calibrated = calibrated_places(knowledge.stored, seen)
    by_launches = {device for device, _ in compared([each for each in knowledge.stored if not each.is_calibration])}
    return CommonChange(
        log=log,
        error=math.sqrt(float(found.covariance[-1, -1])),
        df=model.effects_df,
        cases=len(cases),
        gpus=len(devices),
        is_known=all(place in calibrated or place[0] in by_launches for place in places),
        is_calibrated=places <= calibrated,
        together=float((abs(left[shifted]) <= _ALIKE * abs(log)).mean()),
    )
