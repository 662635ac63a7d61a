"""The tables of docs/explanation/learning.md: twenty faults, what tells of each and when, what a loss curve shows.

    python -m tools.learning_faults           # some minutes on two cores

Each fault is put into the real stack as the tests put it. The curve: the same training on the text that ships, with the
fault, beside eight seeds without; one that leaves their mean by three standard deviations in some quarter of its steps
is seen. Twelve more faults have one launch each, and what its inspected step says. Those without a fault are inspected
too: what is said of them is a false alarm.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.repeats import changed_gradients
from pytest_llmperf.judge.validity import notes, troubles, unlearnt
from pytest_llmperf.records.launch import Launch
from tests.worker import launching
from tests.worker.import_patch import as_on_gpus, in_the_rank
from tests.worker.learning_faults import FAULTS, LLAMA, SPEC, TRAINER, WRONG_GRADIENT, Fault
from tests.worker.own_faults import OWN_FAULTS
from tests.worker.parity import Plain
from tests.worker.parity_faults import FAULTS as OF_PARITY
from tools.tables import table

STEPS, SEEDS, QUARTERS, SDS = 120, 8, 4, 3.0

# Those that need two trainings side by side, by their numbers.
_BESIDE: Mapping[int, str] = {
    6: "a compiled function serves what it was not compiled for",
    7: "autocast does not reach a product",
    10: "accumulated losses are averaged by pass and not by token",
    15: "a gradient is half as long again",
}
_NOTHING = Fault(18, replace(SPEC, model_precision="bf16"), "math", "pass", "")


@dataclass(frozen=True)
class Told:
    """What told of a fault."""

    by: str
    steps: int
    seconds: float
    """Of the launch, from its request on."""


def main() -> None:
    """Print it."""
    with tempfile.TemporaryDirectory() as folder:
        home, clean = Path(folder), _Clean(Path(folder))
        rows = sorted(_rows(home, clean))
        table([("", "fault", "told by", "steps", "launch", "seen in its curve"), *rows])
        table([("fault", "told by the inspected step as"), *_of_others(home)])
        print(f"\n{clean.count} trainings without a fault, {STEPS} steps each: {len(clean.said)} alarms {clean.said}")
        launching.close()


def _rows(home: Path, clean: _Clean) -> Iterator[tuple[str, ...]]:
    for name, fault in {**FAULTS, "a gradient is wrong": WRONG_GRADIENT, "updates lost in bf16": _NOTHING}.items():
        seen = clean.shows(fault.spec, fault.module, fault.patch)
        yield _row(fault.number, name, _by_a_launch(fault, home), seen)
    for number, name in _BESIDE.items():
        beside = OF_PARITY[name]
        spec = replace(SPEC, **beside.spec)
        # Compiling a long training says no more of its curve than the same fault without it would.
        told = _by_parity(spec, beside.module, beside.patch, home)
        yield _row(number, name, told, None if spec.torch_compile else clean.shows(spec, beside.module, beside.patch))


def _of_others(home: Path) -> Iterator[tuple[str, ...]]:
    for name, fault in OWN_FAULTS.items():
        lines = [*unlearnt(fault.spec, _launched(fault.spec, home, fault.module, fault.patch))]
        yield name, "; ".join(lines) or "nothing"


def _row(number: int, name: str, told: Told, seen: bool | None) -> tuple[str, ...]:
    curve = "not tried" if seen is None else "yes" if seen else "no"
    return f"{number:2}", name, told.by, str(told.steps), f"{told.seconds:.1f} s", curve


def _by_a_launch(fault: Fault, home: Path) -> Told:
    begin = time.monotonic()
    launch = _launched(fault.spec, home, fault.module, fault.patch)
    seconds, steps = time.monotonic() - begin, len(launch.losses) + 4  # three that are traced, and the inspected one
    lines = [*unlearnt(fault.spec, launch)]
    if lines:
        return Told("inspected step", steps, seconds)
    if list(changed_gradients([launch], [_launched(fault.spec, home, "math", "pass")])):
        return Told("first gradient, beside a baseline", 1, seconds)
    return Told("inspected step, as a note" if list(notes([launch])) else "nothing", steps, seconds)


def _by_parity(spec: TrainSpec, module: str, patch: str, home: Path) -> Told:
    plain = Plain(spec, _new(home))
    begin = time.monotonic()
    found = plain.beside(spec, _new(home), (module, patch)).troubles
    return Told("parity" if found else "nothing", 2, time.monotonic() - begin)


class _Clean:
    """Trainings without a fault, of each kind as often as there are seeds."""

    def __init__(self, home: Path) -> None:
        self._home, self._known = home, dict[str, list[Sequence[float]]]()
        self.count, self.said = 0, list[str]()

    def shows(self, spec: TrainSpec, module: str, patch: str) -> bool:
        """Whether the curve of a training with the fault leaves those without."""
        long = _long(spec)
        if long.digest not in self._known:
            self._known[long.digest] = [self._curve(replace(long, seed=seed)) for seed in range(1, SEEDS + 1)]
        own = _quarters(_launched(replace(long, seed=1), self._home, module, patch).losses)
        by_quarter = zip(*self._known[long.digest], strict=True)
        return any(abs(one - fmean(others)) > SDS * stdev(others) for one, others in zip(own, by_quarter, strict=True))

    def _curve(self, spec: TrainSpec) -> Sequence[float]:
        launch = _launched(spec, self._home, *_as_it_is(spec))
        self.count += 1
        self.said += troubles(spec, launch)
        return _quarters(launch.losses)


def _long(spec: TrainSpec) -> TrainSpec:
    return replace(spec, data="text", micro_batch_size=4, sequence_length=64, steps=STEPS, min_steps=STEPS)


def _as_it_is(spec: TrainSpec) -> tuple[str, str]:
    return (TRAINER, as_on_gpus()) if spec.parallelism != "ddp" else (LLAMA, "pass")


def _quarters(losses: Sequence[float]) -> list[float]:
    size = len(losses) // QUARTERS
    return [fmean(losses[start : start + size]) for start in range(0, size * QUARTERS, size)]


def _launched(spec: TrainSpec, home: Path, module: str, patch: str) -> Launch:
    folder = _new(home)
    return launching.launched(spec, folder / "run", variables=in_the_rank(folder, module, patch))


def _new(home: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=home))


if __name__ == "__main__":
    main()
