"""Results of nights that never were, for what keeps, divides and draws a history."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date, timedelta

from pytest_llmperf.judge.stats import Noise, Spread
from pytest_llmperf.records.calibration import Place
from pytest_llmperf.records.result import PastLaunch, PastResult

MACHINE = "nvidia-h200-140gib"

#: Of GPUs, known as well as some baselines tell it.
NOISE = Noise(host=Spread(0.0066, 5), site=Spread(0.004, 5), session=Spread(0.004, 6), launch=Spread(0.0023, 9))


def past_result(night: int = 0, case: int = 0, log: float = math.log(0.1), host: int = 0) -> PastResult:
    """Of one night of 2026, one launch on the one GPU of this host."""
    day = (date(2026, 1, 1) + timedelta(night)).isoformat()
    place = Place(f"host {host}", f"NVIDIA H200 GPU-{host:08x}-0000-0000-0000-000000000000", f"{host:08x}")
    return PastResult(
        run=f"night {night}",
        machine=MACHINE,
        id=f"llama-case{case}-gpus1",
        digest=f"{case:016x}",
        nodeid=f"t.py::t[{case}]",
        verdict="pass",
        launches=(PastLaunch(f"{day}T03:{case % 60:02d}:00Z", math.exp(log), 0.001, 1700.0, (place,)),),
        tokens_per_step=1024,
        ranks=1,
        peak_reserved_bytes=2.0**30,
        versions={"torch": "2.11", "driver": "580"},
        revision="0123456789ab",
        counts={"kernels_per_step": 260.0},
    )


def nights(
    num: int = 40,
    cases: int = 1,
    host_of: Callable[[int], int] = lambda night: night,
    slower: Mapping[int, tuple[int, float]] | None = None,
    bad: Mapping[int, float] | None = None,
    seed: int = 1,
    first: int = 0,
) -> list[PastResult]:
    """Of GPUs that differ as ``NOISE`` has it. ``slower``: by case from which night on, by how much; ``bad``: hosts."""
    source, hosts, found = random.Random(seed), dict[int, float](), []
    for night in range(first, first + num):
        host = host_of(night)
        place = hosts.setdefault(host, source.gauss(0, math.hypot(NOISE.host.sd, NOISE.site.sd)))
        place += (bad or {}).get(host, 0.0)
        day = source.gauss(0, NOISE.session.sd)
        for case in range(cases):
            since, by = (slower or {}).get(case, (0, 0.0))
            log = math.log(0.1) + place + day + source.gauss(0, NOISE.launch.sd) + (by if night >= since else 0.0)
            found.append(past_result(night, case, log, host))
    return found


def with_versions(results: Sequence[PastResult], since: int, **versions: str) -> list[PastResult]:
    """The same where these versions ran from this night on."""
    late = (date(2026, 1, 1) + timedelta(since)).isoformat()
    return [replace(one, versions={**one.versions, **versions}) if one.began >= late else one for one in results]
