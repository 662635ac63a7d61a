"""Launches with and without injected slowdowns, on every visible GPU at once: raw data of docs/explanation/noise.md.

    python tools/collect_injections.py --minutes 9 --out launches.jsonl

Each GPU trains alone, one launch after the other, clean and slowed ones in turn, until the time is up. A line is a
launch record and what was injected. With ``--gpus 0`` it does the same with tiny models on the CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from pytest_llmperf import TrainSpec
from pytest_llmperf.launch.device import Gpu
from pytest_llmperf.launch.local import LocalLauncher
from pytest_llmperf.launch.machine import find_machine
from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.records.failure import Failure
from pytest_llmperf.support import codec

# One that the power cap holds back, noisy within a launch, and one that waits for memory, quiet.
SPECS = (
    TrainSpec(model="llama-3.2-1b", liger=True, micro_batch_size=14),
    TrainSpec(model="llama-3.2-1b", attention="eager", micro_batch_size=5),
)
TINY = TrainSpec(model="llama-tiny", sequence_length=64, micro_batch_size=4, steps=24)

# Shares of the step time, in the order of launches; clean ones between, so that pairs lie side by side.
ROUND = (0, 0.03, 0.05, 0, 0.02, 0.03, 0, 0.08, 0.02, 0, 0.05, 0.01, 0, 0.03, 0.02, 0, 0.08, 0.01)


def plan(gpu: Gpu | None) -> Iterator[tuple[TrainSpec, float]]:
    """What one GPU does, without end; every second GPU begins with the other spec."""
    specs = [TINY] if gpu is None else list(SPECS if gpu.index % 2 else reversed(SPECS))
    while True:
        for share in ROUND:
            for spec in specs:
                yield spec, share


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=None, help="of the visible ones; 0 is the CPU")
    options = parser.parse_args()
    gpus: list[Gpu | None] = [*find_machine().gpus[: options.gpus]]
    lock, deadline = threading.Lock(), time.monotonic() + 60 * options.minutes
    home = Path(tempfile.mkdtemp())

    def write(values: dict[str, object]) -> None:
        with lock, options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def work(gpu: Gpu | None) -> None:
        longest = 0.0
        for number, (spec, share) in enumerate(plan(gpu)):
            if time.monotonic() + longest > deadline:
                return
            start = time.monotonic()
            request = LaunchRequest(
                spec=spec,
                folder=home / f"{'cpu' if gpu is None else gpu.index}-{number}",
                gpus=() if gpu is None else (gpu,),
                timeout_seconds=300,
                variables={"LLMPERF_INJECT": f"slow={share}"} if share else {},
            )
            outcome = LocalLauncher().launch(request, lambda _: None)
            longest = max(longest, time.monotonic() - start)
            if isinstance(outcome, Failure):
                print(spec.id, share, outcome.message)
            else:
                write({"injected": share, "launch": codec.plain(outcome)})
                print(
                    f"{'-' if gpu is None else gpu.index} {spec.id} {share} {outcome.median_step_seconds:.5f} "
                    f"{len(outcome.step_seconds)} steps {outcome.wall_seconds:.1f} s",
                    flush=True,
                )

    threads = [threading.Thread(target=work, args=(gpu,)) for gpu in gpus or [None]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
