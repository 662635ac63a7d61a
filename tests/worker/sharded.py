"""One rank of a training by FSDP on the CPU, under torchrun: ``sharded.py FOLDER SPEC.json`` writes what rank 0 saw.

accelerate shards over GPUs alone, and trains with DDP elsewhere without a word: here it is told that these are GPUs.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from pytest_llmperf import TrainSpec
from pytest_llmperf.worker import train
from pytest_llmperf.worker.build import training_arguments
from pytest_llmperf.worker.heartbeat import Heartbeat
from pytest_llmperf.worker.request import Request
from pytest_llmperf.worker.stack_dump import LastWords


def main(folder: Path, text: str) -> None:
    """Train, as the worker would on GPUs."""

    def sharding(*what: Any) -> Any:
        arguments = training_arguments(*what)
        _ = arguments.device  # makes the state
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return arguments

    spec, rank = TrainSpec.from_dict(json.loads(text)), int(os.environ["RANK"])
    words = LastWords(folder, rank)
    with mock.patch.object(train, "training_arguments", sharding):
        beat = Heartbeat(folder, rank, words)
        request = Request(spec=spec, folder=folder, model_config=spec.architecture.config)
        trained = train.train(spec, request, torch.device("cpu"), beat)
    words.close()
    if rank == 0:
        (folder / "trained.json").write_text(json.dumps(asdict(trained), default=str), encoding="utf-8")
    # All ranks have what they came for; gloo's threads, if one is still busy, would abort an interpreter that ends.
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
