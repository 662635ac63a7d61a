"""What is stored: written again byte for byte, and its launches judged to the same verdicts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.frozen.house import replayed, written_again
from tests.golden import Golden

REPOSITORY = Path(__file__).parents[2]
BASELINES = REPOSITORY / "baselines"

# In what order a computer adds numbers is not frozen: the last digits of a double follow from that.
_DECIMALS, _NEAR = 11, 1e-12


def test_each_baseline_is_written_again_byte_for_byte_where_it_stood(tmp_path: Path) -> None:
    paths = sorted(BASELINES.rglob("*.json"))
    assert len(paths) > 100
    for path in paths:
        written_again(path, tmp_path)
    again = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.json")}
    stored = {path.relative_to(BASELINES): path.read_bytes() for path in paths}
    assert again.keys() == stored.keys()
    assert [str(path) for path in stored if again[path] != stored[path]] == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_each_stored_launch_has_its_verdict(golden: Golden) -> None:
    lines = []
    for case, which, judgement, noted in replayed(BASELINES, "nvidia-h200-140gib"):
        is_first = which.endswith("alone")  # What no statistic changes stands there.
        lines.append(f"{case} {which}: {judgement.verdict}{' undecided' if judgement.undecided else ''}")
        lines += [f"  {line}" for line in noted if is_first]
        gating = [check for check in judgement.checks if check.verdict is not None]
        same = [each.metric for each in gating if each.verdict == "pass" and _are_near(each.value, each.baseline)]
        lines += [f"  as before: {' '.join(same)}"] if same and is_first else []
        for check in gating:
            if check.metric not in same and (is_first or check.low is not None):
                numbers = (check.value, check.baseline, check.change, check.limit, check.low, check.high)
                shown = " ".join("-" if each is None else f"{round(float(each), _DECIMALS):.10g}" for each in numbers)
                lines.append(f"  {check.metric} {shown} {check.verdict}")
    golden.check("verdicts.txt", "\n".join(lines))


def _are_near(value: float, baseline: float | None) -> bool:
    return baseline is not None and math.isclose(value, baseline, rel_tol=_NEAR)
