"""Fine-tuning of one and of eight billion weights as it was measured: rates with intervals, memory, MFU and energy.

    python -m tools.fine_tuning [--write]

The stored launches of each case of ``perf_tests/fine_tuning.py`` on a kind of GPU. The interval has the mean rate of
all GPUs of that kind in 95 of 100: by how hosts, GPUs, days and launches scatter in all baselines of the kind.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from perf_tests.fine_tuning import FINE_TUNING
from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.baseline import Baseline, BaselineStore
from pytest_llmperf.judge.gpu_knowledge import Knowledge
from pytest_llmperf.records.launch import Launch
from tools import tables

BASELINES = Path(__file__).parents[1] / "baselines"
_TIMES = 1.96


def _trained(spec: TrainSpec) -> str:
    if not spec.lora:
        shared = ", sharded" if spec.parallelism == "fsdp" else ""
        fp8 = ", fp8" * (spec.fp8 != "no") + ", gathered so" * spec.fp8.endswith("gather")
        return "all weights" + shared + ", compiled" * spec.torch_compile + fp8
    of = "" if spec.lora_targets == "all-linear" else f" of {spec.lora_targets}"
    more = ", dropout" if spec.lora_dropout else ""
    return f"LoRA {spec.lora_rank}{of}{more}" + (" over nf4" if spec.lora_base == "nf4" else "")


def times(launches: Sequence[Launch], knowledge: Knowledge) -> float:
    """By how much the mean rate of all GPUs of a kind may be above, or below, that of ``launches``, 95 times of 100."""
    noise = knowledge.usual(launches)
    sd = math.sqrt(sum(spread.sd**2 for spread in (noise.host, noise.site, noise.session, noise.launch)))
    return math.exp(_TIMES * sd / math.sqrt(len({each.host for each in launches})))


def rate(spec: TrainSpec, launches: Sequence[Launch]) -> float:
    """Tokens/s of one of its GPUs."""
    tokens = spec.sequences_per_step * spec.sequence_length / spec.gpus  # of which ranks of context have a part each
    return math.exp(fmean(math.log(tokens / each.median_step_seconds) for each in launches))


def _row(spec: TrainSpec, stored: Baseline, knowledge: Knowledge) -> tuple[str, ...]:
    launches = stored.launches
    middle, wide = rate(spec, launches), times(launches, knowledge)
    accepted = stored.history[-1].metrics
    return (
        spec.model,
        str(spec.gpus),
        f"{spec.micro_batch_size} x {spec.sequence_length:,}",
        _trained(spec) + ("" if spec.gradient_checkpointing or "1b" in spec.model else ", nothing made again"),
        f"{middle:,.0f}",
        f"{middle / wide:,.0f} to {middle * wide:,.0f}",
        str(len(launches)),
        f"{accepted['peak_reserved_bytes'] / 2**30:.1f} GiB",
        f"{accepted['mfu'] * 100:.1f} %",
        f"{accepted['joules_per_token'] * 1000:.1f} mJ",
    )


def rows(machine: str) -> Iterator[tuple[str, ...]]:
    """The header, and a row for each case that was launched on ``machine``."""
    stored = {each.digest: each for each in BaselineStore(BASELINES).baselines(machine)}
    knowledge = Knowledge.of([each.launches for each in stored.values()])
    rates = ("tokens/s/GPU", "95 of 100", "launches")
    yield ("model", "GPUs", "of each a step", "trained", *rates, "memory", "MFU", "a token")
    for case in FINE_TUNING:
        if knowledge and case.spec.digest in stored:
            yield _row(case.spec, stored[case.spec.digest], knowledge)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    tables.add_option(parser)
    is_kept = parser.parse_args().write
    for machine in BaselineStore(BASELINES).machines():
        found = list(rows(machine))
        if len(found) > 1:
            print(machine)
            tables.table(found, f"fine-tuning-{machine.split('-')[1]}" if is_kept else "")


if __name__ == "__main__":
    main()
