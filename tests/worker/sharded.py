"""Trainings by FSDP on the CPU: ``python -m tests.worker.sharded`` reads lines of a folder and a spec's JSON.

Each is a torchrun of its own whose ranks are forked, since all of them import the same; rank 0 leaves what it saw.
accelerate shards over GPUs alone, and trains with DDP elsewhere without a word: here it is told that these are GPUs.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pytest_llmperf import TrainSpec
from pytest_llmperf.worker import train
from pytest_llmperf.worker.build import training_arguments
from pytest_llmperf.worker.heartbeat import Heartbeat
from pytest_llmperf.worker.request import Request
from pytest_llmperf.worker.stack_dump import LastWords


def rank(folder: Path, spec: TrainSpec) -> None:
    """Train, as the worker would on GPUs."""

    def sharding(*what: Any) -> Any:
        arguments = training_arguments(*what)
        _ = arguments.device  # makes the state
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return arguments

    number = int(os.environ["RANK"])
    words = LastWords(folder, number)
    with mock.patch.object(train, "training_arguments", sharding):
        beat = Heartbeat(folder, number, words)
        request = Request(spec=spec, folder=folder, model_config=spec.architecture.config)
        trained = train.train(spec, request, torch.device("cpu"), beat)
    words.close()
    if number == 0:
        (folder / "trained.json").write_text(json.dumps(asdict(trained), default=str), encoding="utf-8")
    dist.barrier()  # all ranks have what they came for, and none ends while another still asks it


def torchrun(folder: Path, spec: TrainSpec) -> int:
    """One launch, in a process of its own: threads of torchrun's must not be there when the next is forked."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=spec.gpus,
                run_id=folder.name,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                start_method="fork",
                max_restarts=0,
                monitor_interval=0.05,
            )
            elastic_launch(config, rank)(folder, spec)
            code = 0
        except BaseException:  # noqa: BLE001 - a fork never returns into what its parent was doing
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    for line in sys.stdin:
        order = json.loads(line)
        if torchrun(Path(order["folder"]), TrainSpec.from_dict(order["spec"])):
            sys.exit(1)
