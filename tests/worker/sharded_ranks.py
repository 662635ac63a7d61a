"""Real ranks of sharded trainings, all forked from one process: what they exchanged in a step, as PyTorch recorded it.

``python -m tests.worker.sharded_ranks FILE SPEC…`` leaves a line of JSON for each spec.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from transformers import AutoModelForCausalLM

from pytest_llmperf.observe.places import exchanges, recorded
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.build import hf_config_of
from pytest_llmperf.worker.estimate.exchanges import shard
from pytest_llmperf.worker.estimate.memory_estimator import GpuFunctions
from pytest_llmperf.worker.settings.parallelism import mesh_sizes

STEPS, SECONDS = 2, 120


_kernels = torch.library.Library("aten", "IMPL")


def give_the_cpu_a_gpus_attention() -> None:
    """Ranks pass keys and values on between calls of a GPU's kernel: the CPU's own here, which returns as much."""
    flash = "_scaled_dot_product_flash_attention"
    ours, its_backward = (getattr(torch.ops.aten, f"{flash}_for_cpu{end}") for end in ("", "_backward"))

    def forward(
        query: Any, key: Any, value: Any, _: float = 0.0, is_causal: bool = False, *, scale: float | None = None
    ) -> Any:
        made, none = ours(query, key, value, 0.0, is_causal, scale=scale), torch.zeros((), dtype=torch.long)
        return *made, none, none, query.shape[2], key.shape[2], none, none, none

    def backward(*given: Any, scale: float | None = None) -> Any:
        return its_backward(*given[:6], 0.0, given[11], scale=scale)

    _kernels.impl(flash, forward, "CPU")
    _kernels.impl(f"{flash}_backward", backward, "CPU")


def train(spec: TrainSpec, rank: int, store: str, file: Path) -> None:
    """As one rank of them; the first writes to the file."""
    torch.set_num_threads(1)
    give_the_cpu_a_gpus_attention()
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=spec.gpus)
    ranks, is_tensor = ParallelismConfig(**mesh_sizes(spec, spec.gpus)), spec.parallelism == "tensor"
    ranks.get_device_mesh("cpu")
    model = AutoModelForCausalLM.from_config(hf_config_of(spec.architecture.config))
    divided = shard(spec, model, ranks)
    optimizer, passes = torch.optim.AdamW(model.parameters()), spec.gradient_accumulation_steps
    ids = torch.zeros(spec.micro_batch_size, spec.sequence_length, dtype=torch.long)
    ends = [time.time_ns()]
    for _ in range(STEPS):
        # As the Trainer adds up a step's tokens.
        dist.all_gather_into_tensor(torch.zeros(spec.gpus, dtype=torch.long), torch.zeros(1, dtype=torch.long))
        for number in range(1, passes + 1):
            if not is_tensor:
                model.set_requires_gradient_sync(number == passes)
            kernels = GpuFunctions(None, 0) if spec.parallelism == "context" else nullcontext()
            with divided({"input_ids": ids, "labels": ids}) as given, kernels:
                model(**given).loss.backward()
        if is_tensor:  # as the Trainer adds up squares
            dist.all_reduce(torch.zeros(()))
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.time_ns())
    found = exchanges(recorded(dist), ends, lambda _: []).rows
    counts, sizes = ({row.name: row.count for row in found if row.kind == kind} for kind in ("exchange", "payload"))
    if dist.get_rank() == 0:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({name: [counts[name], sizes.get(name, 0)] for name in counts}) + "\n")
    dist.destroy_process_group()


def main(file: Path, specs: list[TrainSpec]) -> int:
    forks = multiprocessing.get_context("fork")
    for spec in specs:
        with tempfile.TemporaryDirectory() as folder:
            words = (f"{folder}/store", file)
            ranks = [forks.Process(target=train, args=(spec, rank, *words)) for rank in range(spec.gpus)]
            for one in ranks:
                one.start()
            for one in ranks:
                one.join(SECONDS)
            if any(one.exitcode for one in ranks):
                for one in ranks:
                    one.kill()
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [TrainSpec.from_dict(json.loads(word)) for word in sys.argv[2:]]))
