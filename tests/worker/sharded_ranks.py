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
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from pytest_llmperf.observe.places import exchanges, recorded
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.build import hf_config_of
from pytest_llmperf.worker.estimate.arithmetic import ranks_of, shard

STEPS, SECONDS = 2, 120


def train(spec: TrainSpec, rank: int, store: str, file: Path) -> None:
    """As one rank of them; the first writes to the file."""
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=spec.gpus)
    ranks, is_tensor = ranks_of(spec, spec.gpus), spec.parallelism == "tensor"
    ranks.get_device_mesh("cpu")
    model = AutoModelForCausalLM.from_config(hf_config_of(spec.architecture.config))
    shard(spec, model, ranks)
    optimizer, passes = torch.optim.AdamW(model.parameters()), spec.gradient_accumulation_steps
    ids = torch.zeros(spec.micro_batch_size, spec.sequence_length, dtype=torch.long)
    ends = [time.time_ns()]
    for _ in range(STEPS):
        # As the Trainer adds up a step's tokens.
        dist.all_gather_into_tensor(torch.zeros(spec.gpus, dtype=torch.long), torch.zeros(1, dtype=torch.long))
        for number in range(1, passes + 1):
            if not is_tensor:
                model.set_requires_gradient_sync(number == passes)
            model(input_ids=ids, labels=ids).loss.backward()
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
