"""Which optimisations apply to which model family, asked of small models: the table of docs/how-to/own-model.md.

    python -m tools.families

Attention that a CPU can run is run, forward and backward; of the others the model class's own word is told. Liger
patches on a CPU as on a GPU, so its modules are counted; each family in a process of its own: it patches for good.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from tests.worker.families import FAMILIES

COLUMNS = ("family", "eager", "sdpa", "flash_attention_2", "flex_attention", "checkpointing", "Liger: modules patched")


def main() -> None:
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for family in FAMILIES:
        code = f"from tools.families import row; print(row({family!r}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        print(done.stdout.strip() or f"| {family} | {done.stderr.strip().splitlines()[-1]} |", flush=True)


def row(family: str) -> str:
    """The family's line."""
    import torch  # noqa: PLC0415 - in the process of one family

    from pytest_llmperf.settings.train_spec import TrainSpec  # noqa: PLC0415
    from pytest_llmperf.worker.build import build_model  # noqa: PLC0415
    from pytest_llmperf.worker.settings.attention import attentions_of  # noqa: PLC0415
    from pytest_llmperf.worker.settings.liger import liger_forwards  # noqa: PLC0415

    config = {"model_type": family, **FAMILIES[family]}

    def trains(**settings: Any) -> str:
        spec = TrainSpec(model="llama-tiny", sequence_length=64, **settings)
        try:
            model = build_model(spec, config, torch.device("cpu")).train()
            if spec.gradient_checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            ids = torch.zeros(2, 60, dtype=torch.long)
            model(input_ids=ids, labels=ids).loss.backward()
        except (ValueError, NotImplementedError):
            return "refused"
        return "ran"

    ran = [trains(attention="eager"), trains(attention="sdpa")]
    checkpointing = trains(attention="eager", gradient_checkpointing=True)
    model = build_model(TrainSpec(model="llama-tiny", attention="eager"), config, torch.device("cpu"))
    there = attentions_of(type(model))
    says = [name in there for name in ("flash_attention_2", "flex_attention")]

    from transformers.integrations.liger import apply_liger_kernel  # noqa: PLC0415

    apply_liger_kernel(model, None)
    cells = [
        family,
        *ran,
        *("says yes" if yes else "says no" for yes in says),
        checkpointing,
        str(len(liger_forwards(model))),
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
