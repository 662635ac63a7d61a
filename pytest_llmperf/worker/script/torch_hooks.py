"""Hooks in PyTorch that a user's own training runs through: backward passes, calls of optimizers, scaled losses.

Each costs its caller microseconds and changes nothing of it. What is ours and fails ends the watching and never the
training; the launcher is told."""

from __future__ import annotations

import atexit
import functools
import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess, current_process
from pathlib import Path
from typing import Any

import psutil
import torch
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from pytest_llmperf.observe.environment import Project
from pytest_llmperf.observe.measurement import resident
from pytest_llmperf.observe.vital_signs import Headroom, LastWords
from pytest_llmperf.records.failure import lack_of_memory
from pytest_llmperf.records.launch import NO_RANKS
from pytest_llmperf.records.ranks import ASKS, write_failure
from pytest_llmperf.settings.spec import ScriptSpec
from pytest_llmperf.worker.script.steps import StepsError
from pytest_llmperf.worker.script.watched_rank import AnotherRankError, Rank, place


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def loss_of(roots: Any) -> torch.Tensor | None:
    """What a pass that begins from ``roots`` begins from, where that is one number."""
    root: Any = found[0] if len(found := _listed(roots)) == 1 else None
    if not isinstance(root, torch.Tensor):
        return None
    if hasattr(root, "to_local"):  # of ranks that hold one tensor together
        if not all(each.is_replicate() for each in root.placements):
            return None
        root = root.detach().to_local()
    return root if root.numel() == 1 else None


def _are_imagined(tensors: Any) -> bool:
    """Whether nothing is computed: a training counts its own arithmetic so, before it begins."""
    return any(type(one).__name__ == "FakeTensor" or getattr(one, "is_meta", False) for one in _listed(tensors))


# They only say that another process has failed, which says why itself.
_OF_OTHERS = {"ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "CalledProcessError"}

# A compiler that runs one of ours in the user's own code does not look into it, and of what it calls not at all.
_uncompiled = functools.partial(_disable_dynamo, recursive=False)


@_disable_dynamo
def _run(ours: Callable[..., None], *args: Any) -> None:
    # What is captured is replayed where no hook is called, and whatever we issued would be part of it.
    if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        ours(*args)


def _wrap(owner: Any, name: str, ours: Callable[..., Any], *, is_compiled: bool = True) -> None:
    """``ours`` is called in the place of what is there, and gets it first; ``is_compiled``: a user's code may be."""
    theirs = getattr(owner, name)

    @functools.wraps(theirs)
    def watched(*args: Any, **kwargs: Any) -> Any:
        return ours(theirs, *args, **kwargs)

    setattr(owner, name, _uncompiled(watched) if is_compiled else watched)


def watch(folder: str) -> None:
    """Torch has been imported in this process: hear of what trains in it."""
    path = Path(folder)
    values = json.loads((path / "request.json").read_text(encoding="utf-8"))
    spec = ScriptSpec(**values["spec"])
    if spec.seed is not None:
        # Ranks have different numbers, as they have where nobody seeds: a process that is spawned by its own.
        spawned = re.search(r"-(\d+)$", current_process().name)  # from 1; the first process has none
        seed = (spec.seed + int(os.environ.get("RANK") or (int(spawned[1]) - 1 if spawned else 0))) % 2**32
        random.seed(seed)
        torch.manual_seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
    LastWords(path, os.getpid(), ASKS)  # until it is a rank
    headroom = Headroom()
    if values["memory_limit_bytes"]:  # of a CPU: a card's own limit is the script's
        headroom.cap(torch.device("cpu"), values["memory_limit_bytes"])
    Hooks(path, functools.partial(Rank, path, spec, Project(spec.folder(Path(values["root"])))), headroom).install()


class Hooks:
    """Those of this process, which is a rank once it has gone backward."""

    def __init__(self, folder: Path, made: Callable[..., Any], headroom: Headroom | None = None) -> None:
        """``made`` gives what hears of a rank: on its device, with what was resident before."""
        self._folder, self._made, self._headroom = folder, made, headroom or Headroom()
        self._resident = resident()
        self._rank: Any = None
        self._is_out = False  # nothing is watched any more
        self._is_inside = False  # a backward pass runs
        self._is_fetching, self._thread = False, threading.get_ident()  # inside a loader; who trains
        self._calls: list[tuple[Any, bool]] = []  # of optimizers, in the pass that runs, and whether each was skipped
        self._num_calls = 0
        self._unscaled: list[torch.Tensor] = []  # losses that were scaled since the last pass
        self._scales_otherwise = False  # a scaler that does it in its own way, as FSDP1's does
        self._remarks: dict[str, None] = {}

    def install(self) -> None:
        register_optimizer_step_post_hook(_uncompiled(lambda optimizer, *_: self._optimizer_called(optimizer)))
        _wrap(torch.autograd, "backward", self._backward)
        _wrap(GradScaler, "step", self._scaler_step)
        _wrap(GradScaler, "scale", self._scale)
        _wrap(_BaseDataLoaderIter, "__next__", self._fetch)
        _wrap(torch.cuda.memory, "reset_peak_memory_stats", self._peak_reset, is_compiled=False)
        torch.cuda.reset_peak_memory_stats = torch.cuda.memory.reset_peak_memory_stats
        _wrap(BaseProcess, "run", self._process, is_compiled=False)
        _wrap(sys, "excepthook", self._uncaught, is_compiled=False)
        self._hook = sys.excepthook  # whoever tells of an end in its place tells nobody else
        atexit.register(self._script_ended)
        # A rank's child has a copy of all this and is no rank: what it left would be taken for its parent's.
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._is_out = self._is_out or self._rank is not None

    def _guarded(self, ours: Callable[..., None], *args: Any) -> None:
        if self._is_out:
            return
        try:
            _run(ours, *args)
        except AnotherRankError:
            self._is_out = True
        except Exception as error:  # noqa: BLE001 - whatever we did wrong, the training is not ours to end
            self._fail(error)

    def _fail(self, error: BaseException, *, ends: bool = False) -> None:
        """The watching ends here, and the process where it ``ends``; the launcher is told why."""
        self._is_out = True
        refused = isinstance(error, StepsError)
        if self._rank and not self._rank.may_tell(error):
            return
        if ends and (not self._rank or not self._rank.has_stepped or (refused and self._is_a_child())):
            # What only looks whether something is there may end so, too, and what trains beside the script's training.
            self._folder /= NO_RANKS
            if self._rank:
                self._rank.leave()
        with suppress(Exception), self._headroom.lifted():
            self._folder.mkdir(exist_ok=True)
            oom = not refused and lack_of_memory(error, self._headroom.after) is not None
            number = self._rank.number if self._rank else place()[0]
            write_failure(self._folder, number, error, "refused" if refused else "oom" if oom else "error")

    def _is_a_child(self) -> bool:
        """Whether a process that is watched started this one for itself; a launcher gives each rank its number."""
        rank = os.environ.get("RANK")
        with suppress(psutil.Error):
            watched = (one for one in psutil.Process().parents() if (self._folder / f"seen-{one.pid}").exists())
            return any(one.environ().get("RANK") == rank for one in watched)
        return False

    # What torch calls.

    @_uncompiled
    def _backward(self, backward: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        # Checkpointing goes backward inside of a pass, on whichever thread.
        if self._is_inside or self._is_out or _are_imagined(tensors):
            return backward(tensors, *args, **kwargs)
        self._guarded(self._pass_begins, tensors)
        self._is_inside, is_whole = True, False
        try:
            result = backward(tensors, *args, **kwargs)
            is_whole = True
        finally:
            self._is_inside = False
            self._guarded(self._pass_ended, is_whole)
        return result

    def _pass_begins(self, roots: Any) -> None:
        scaled, self._unscaled = self._unscaled, []
        loss = loss_of(roots) if not scaled else scaled[0] if len(scaled) == 1 else None
        loss = None if self._scales_otherwise else loss
        (self._rank or self._begun(roots)).pass_begins(loss)

    def _pass_ended(self, is_whole: bool) -> None:
        if self._rank is not None:
            self._rank.pass_ended(is_whole=is_whole)
            self._tell_calls()  # now: a profiler that begins inside of a pass sees nothing

    def _optimizer_called(self, optimizer: Any, *, is_skipped: bool = False) -> None:
        if self._is_out:
            return
        self._num_calls += 1
        if self._rank is None or not self._rank.is_aside(optimizer):
            self._calls.append((optimizer, is_skipped))
            if not self._is_inside:
                self._guarded(self._tell_calls)

    def _tell_calls(self) -> None:
        calls, self._calls = self._calls, []
        if not calls:
            return
        rank = self._rank or self._begun([p for group in calls[0][0].param_groups for p in group["params"][:1]])
        if rank.called(calls):
            self._is_out = True
            rank.finish(self._remarks)

    def _begun(self, tensors: Any) -> Any:
        device = next((one.device for one in _listed(tensors) if isinstance(one, torch.Tensor)), torch.device("cpu"))
        self._rank, self._thread = self._made(device, self._resident), threading.get_ident()
        return self._rank

    @_uncompiled
    def _scaler_step(self, step: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Where a scaler skips a step, that has ended without a call of its optimizer."""
        before = self._num_calls
        self._scales_otherwise = self._scales_otherwise or type(scaler).scale is not GradScaler.scale
        result = step(scaler, optimizer, *args, **kwargs)
        if self._num_calls == before:
            self._optimizer_called(optimizer, is_skipped=True)
        return result

    @_uncompiled
    def _scale(self, scale: Any, scaler: Any, outputs: Any) -> Any:
        # The loss is kept as it was: dividing later is device work. Of several nobody knows where a pass begins.
        if not self._is_out and isinstance(outputs, torch.Tensor):
            self._unscaled = [*self._unscaled[:1], outputs.detach()]
        return scale(scaler, outputs)

    def _peak_reset(self, reset: Any, *args: Any, **kwargs: Any) -> None:
        if self._rank is not None:  # before the first step it hides nothing
            self._remarks["the script resets the peak of memory: the peak here is of its last steps alone"] = None
        reset(*args, **kwargs)

    @_uncompiled
    def _fetch(self, fetch: Any, loader: Any) -> Any:
        """How long the host is inside of a loader; batches that another thread fetches keep nobody waiting."""
        if self._rank is None or self._is_out or self._is_fetching or threading.get_ident() != self._thread:
            return fetch(loader)
        self._is_fetching, start = True, time.time_ns()
        try:
            return fetch(loader)
        finally:
            self._is_fetching = False
            self._rank.fetched(start, time.time_ns(), from_workers=loader._num_workers > 0)  # noqa: SLF001

    # How the process ends.

    def _uncaught(self, tell: Any, kind: Any, error: BaseException, traceback: Any) -> None:
        self._raised(error)
        tell(kind, error, traceback)

    def _process(self, run: Any, process: Any) -> None:
        try:
            run(process)
        except BaseException as error:
            # No hook hears of it, and torch's spawn exits in its place.
            exits, is_ended_well = isinstance(error, SystemExit), not getattr(error, "code", 1)
            self._raised(None if is_ended_well else error.__context__ if exits else error)
            raise

    def _raised(self, error: BaseException | None) -> None:
        is_others = isinstance(error, KeyboardInterrupt) or type(error).__name__ in _OF_OTHERS
        if error is not None and not is_others and not self._is_out:
            self._fail(error, ends=True)

    def _script_ended(self) -> None:
        self._raised(None if sys.excepthook is self._hook else getattr(sys, "last_value", None))
        if self._rank is None or self._is_out:
            return
        try:
            self._rank.script_ended(self._remarks)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error, ends=True)
        self._is_out = True
