"""Data: who fetches it, and what becomes of a rank whose worker dies; the recipe's ``data.py`` makes what is read."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from pytest_llmperf.observe.device import is_gpu
from pytest_llmperf.settings.data import DataEvidence
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.worker.settings import Training
from pytest_llmperf.worker.warm.agent import die_with


def arguments(spec: TrainSpec, device: torch.device) -> Mapping[str, Any]:
    return {
        "dataloader_num_workers": spec.data_workers,
        "dataloader_prefetch_factor": spec.data_prefetch,
        "dataloader_pin_memory": is_gpu(device) and spec.data_pinned,
    }


def _seen(training: Training) -> DataEvidence:
    loader = training.trainer.callback_handler.train_dataloader
    return DataEvidence(
        data_workers=loader.num_workers,
        data_prefetch=loader.prefetch_factor or 0,
        # Without an accelerator PyTorch pins nothing, whatever it is asked for.
        data_pinned=bool(loader.pin_memory) and is_gpu(training.device),
    )


WITNESSES = {"data": lambda *_: _seen}

# A worker's end is a matter of milliseconds after that of its pipe.
_SECONDS = 1.0

# Source: torch/utils/data (_utils/signal_handling.py and dataloader.py), and torch/_utils.py of what a worker raises.
_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (?:is killed by signal: ([^.]+)|exited)")
_RAISED = re.compile(r"Caught (\w+) in DataLoader worker process (\d+)")


class DataWorkerError(Exception):
    """A worker has died, or could not fetch; one line."""


def bind_workers(loader: Any) -> None:
    """Let the workers that ``loader`` forks later end with this process: one with a batch to hand over never looks."""
    own = getattr(loader, "base_dataloader", loader)  # accelerate wraps it
    if own.num_workers:
        own.worker_init_fn = partial(_begin, os.getpid(), own.worker_init_fn)


def _begin(rank: int, own: Callable[[int], None] | None, number: int) -> None:
    die_with(rank, signal.SIGKILL)
    if own is not None:
        own(number)


@contextmanager
def explained() -> Iterator[None]:
    """Raise a ``DataWorkerError`` in the place of whatever says that a worker has died, or could not fetch."""
    try:
        yield
    except Exception as error:
        # Who dies while it hands a batch over leaves a pipe that ends, before its own end is told.
        line = _line(str(error)) or (_line_of_the_dead() if isinstance(error, EOFError | ConnectionError) else None)
        if line is None:
            raise
        # PyTorch raises this anew for each child that ends from now on, wherever this process then is.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        raise DataWorkerError(line) from error


def _line_of_the_dead() -> str | None:
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until:
        try:
            torch._C._error_if_any_worker_fails()  # noqa: SLF001 - what its own handler of SIGCHLD asks
        except RuntimeError as error:
            return _line(str(error))
        time.sleep(_SECONDS / 20)
    return None


def _line(message: str) -> str | None:
    if died := _DIED.search(message):
        pids, how = died.group(1), f" ({died.group(2).strip()})" if died.group(2) else ""
        return (
            f"a data worker (pid {pids}) has died{how}; its host may be short of memory, or of /dev/shm, through which "
            "batches come: take fewer data_workers, or a smaller data_prefetch"
        )
    if raised := _RAISED.search(message):
        last = next(line.strip() for line in reversed(message.splitlines()) if line.strip())
        return f"data worker {raised.group(2)} could not fetch: {last}"
    return None
