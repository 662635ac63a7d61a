"""Long context as it was predicted and measured: by which choices one sequence fits, and what it takes then.

    python -m tools.lengths [--write]

The cases of ``perf_tests/lengths.py``. What is predicted is what tensors take at the peak, as by ``llmperf plan``, in
minutes and with PEFT and Liger installed. The allocator reserved up to 12 % more (docs/explanation/memory.md): what
would not fit with that is near a card's memory. Of a case that is stored, a row for each kind of GPU; the interval is
that of ``tools.fine_tuning``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

from perf_tests.lengths import LONG_CONTEXT
from pytest_llmperf import GIB, TrainSpec
from pytest_llmperf.judge.baseline import Baseline, BaselineStore
from pytest_llmperf.judge.gpu_knowledge import Knowledge
from pytest_llmperf.launch.prediction import PredictionError, predictions
from tools import tables
from tools.fine_tuning import BASELINES, rate, times

NAME = "long-context"
HEADER = (
    *("model", "tokens", "trained", "by", "GPUs", "predicted", "80 GB", "140 GB"),
    *("on", "tokens/s/GPU", "95 of 100", "launches", "memory", "MFU"),
)
#: GiB that PyTorch has of an H100 and of an H200.
CARDS = (79.2, 139.8)
_RESERVED = 1.12

_LAUNCHED = tuple[str, Baseline, Knowledge]


def _trained(spec: TrainSpec) -> str:
    if spec.lora:
        return "LoRA" + " over nf4" * (spec.lora_base == "nf4")
    return "all weights" + ", mixed precision" * (spec.mixed_precision != "no")


def _choices(spec: TrainSpec) -> str:
    found = {
        "Liger": spec.liger,
        "checkpointing": spec.gradient_checkpointing,
        "offloading": spec.offloading != "no",
        spec.optimizer: "8bit" in spec.optimizer,
        spec.parallelism: spec.gpus > 1,
    }
    return ", ".join(name for name, is_on in found.items() if is_on)


def fits(gib: float, card: float) -> str:
    return "no" if gib > card else "near" if gib * _RESERVED > card else "yes"


def asked(spec: TrainSpec) -> tuple[str, ...]:
    return (spec.model, f"{spec.sequence_length:,}", _trained(spec), _choices(spec), str(spec.gpus))


def row(spec: TrainSpec, parts: Mapping[str, int] | PredictionError, launched: _LAUNCHED | None) -> tuple[str, ...]:
    gib = None if isinstance(parts, PredictionError) else sum(parts.values()) / GIB
    known = ("not modelled", "", "") if gib is None else (f"{gib:.1f} GiB", *(fits(gib, card) for card in CARDS))
    if launched is None:
        found = (*asked(spec), *known)
        return (*found, *[""] * (len(HEADER) - len(found)))
    machine, stored, knowledge = launched
    middle, wide = rate(spec, stored.launches), times(stored.launches, knowledge)
    accepted = stored.history[-1].metrics
    return (
        *asked(spec),
        *known,
        machine.split("-")[1].upper(),
        f"{middle:,.0f}",
        f"{middle / wide:,.0f} to {middle * wide:,.0f}",
        str(len(stored.launches)),
        f"{accepted['peak_reserved_bytes'] / GIB:.1f} GiB",
        f"{accepted['mfu'] * 100:.1f} %",
    )


def _launched() -> Mapping[str, Sequence[_LAUNCHED]]:
    """By digest, what is stored of whole cards of each kind of GPU."""
    store, found = BaselineStore(BASELINES), dict[str, list[_LAUNCHED]]()
    for machine in (name for name in store.machines() if name.startswith("nvidia") and "limit" not in name):
        stored = store.baselines(machine)
        knowledge = Knowledge.of([each.launches for each in stored])
        if knowledge is None:
            continue
        for each in stored:
            found.setdefault(each.digest, []).append((machine, each, knowledge))
    return found


def rows() -> Iterator[tuple[str, ...]]:
    yield HEADER
    launched, specs = _launched(), [case.spec for case in LONG_CONTEXT]
    for spec, parts in zip(specs, predictions(specs), strict=True):
        for each in launched.get(spec.digest, (None,)):
            yield row(spec, parts, each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables.add_option(parser)
    tables.table(rows(), NAME if parser.parse_args().write else "")


if __name__ == "__main__":
    main()
