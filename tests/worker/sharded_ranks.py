"""Real ranks of a sharded training, for ``torchrun``: what they exchanged in a step, as PyTorch recorded it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig
from transformers import AutoModelForCausalLM

from pytest_llmperf.observe.places import exchanges, recorded
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.build import hf_config_of
from pytest_llmperf.worker.estimate.arithmetic import shard
from pytest_llmperf.worker.settings.parallelism import replicas_and_shards

STEPS = 2


def main(spec: TrainSpec, file: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    replicas, shards = replicas_and_shards(spec, spec.gpus)
    ranks = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards)
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
            model.set_requires_gradient_sync(number == passes)
            model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.time_ns())
    found = exchanges(recorded(dist), ends, lambda _: []).rows
    counts, sizes = ({row.name: row.count for row in found if row.kind == kind} for kind in ("exchange", "payload"))
    if dist.get_rank() == 0:
        file.write_text(json.dumps({name: [counts[name], sizes.get(name, 0)] for name in counts}), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(TrainSpec.from_dict(json.loads(sys.argv[1])), Path(sys.argv[2]))
