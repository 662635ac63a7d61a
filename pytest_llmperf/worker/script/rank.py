"""One process of a user's own training, watched by hooks: where its steps end, its losses, tokens, memory and trace.

Nothing waits for the device while steps are timed. What is ours and fails ends the watching and never the training; the
launcher is told. After its last step a rank leaves its share of the record and stays where it is: the launcher ends it.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook

from pytest_llmperf.observe.environment import environment
from pytest_llmperf.observe.heartbeat import Heartbeat, LastWords
from pytest_llmperf.observe.measurement import Boundary, HostMemory, Memory, resident
from pytest_llmperf.observe.places import Project
from pytest_llmperf.observe.tracer import STEPS as TRACED_STEPS
from pytest_llmperf.observe.training import ObservedTraining, Plan
from pytest_llmperf.records.launch import ENVIRONMENT_FILE, SHARE_FILE
from pytest_llmperf.records.trained import Share
from pytest_llmperf.settings.script_spec import ScriptSpec
from pytest_llmperf.support import codec
from pytest_llmperf.worker.folder import write_failure, write_json
from pytest_llmperf.worker.installed import loaded
from pytest_llmperf.worker.script.evidence import evidence
from pytest_llmperf.worker.script.model import Model
from pytest_llmperf.worker.script.steps import Steps

# Backward passes of which losses are kept: those of the timed steps, unless a step has hundreds.
_MOST_LOSSES = 8192

# Calls of optimizers after which the model is there, as it trains.
_BUILT = 2


class Rank:
    """What is known of this process; it is a rank once it has gone backward."""

    def __init__(self, folder: Path, spec: ScriptSpec, project: Project) -> None:
        self._folder, self._spec, self._project = folder, spec, project
        self._resident = resident()
        self._steps = Steps(spec.step, spec.training)
        self._observed: ObservedTraining | None = None
        self._beat: Heartbeat | None = None
        self._model: Model | None = None
        self._losses: _Losses | None = None
        self._depth = self._passes = self._num_steps = self._num_optimizers = 0
        self._calls: list[tuple[Any, bool]] = []  # of optimizers inside a backward pass
        self._raw: dict[int, Boundary[Any]] = {}
        self._skipped: list[int] = []
        self.is_over = False

    @property
    def num_calls(self) -> int:
        """Of optimizers, so far."""
        return self._steps.num_calls + len(self._calls)

    def scaled_by(self, scale: torch.Tensor | None) -> None:
        """A GradScaler multiplies losses by ``scale``, which changes from step to step and stays on its device."""
        if self._losses is not None:
            self._losses.scale = scale

    # What the hooks hear of.

    def begin_pass(self, roots: Any) -> None:
        """A backward pass begins from ``roots``."""
        self._depth += 1
        if self._depth > 1:
            return
        root = next((one for one in (roots if isinstance(roots, Sequence) else [roots]) if _is_loss(one)), None)
        if self._observed is None:
            self._begin(root.device if root is not None else _device())
        self._passes += 1
        observed, losses = self._observed, self._losses
        if observed is not None and losses is not None and not observed.measurement.is_over:
            tokens = self._model.tokens() if self._model else 0
            observed.measurement.end_pass(losses.keep(root), tokens, None)

    def end_pass(self) -> None:
        """It has ended, and what optimizers did inside it has."""
        self._depth -= 1
        if self._depth == 0 and self._calls:
            calls, self._calls = self._calls, []
            self._called(calls)

    def stepped(self, optimizer: Any, *, skipped: bool = False) -> None:
        """A call of ``optimizer`` has ended; ``skipped``: it did nothing, since gradients were infinite."""
        if self._depth:
            self._calls.append((optimizer, skipped))
        else:
            self._called([(optimizer, skipped)])

    def _called(self, calls: Sequence[tuple[Any, bool]]) -> None:
        """So many calls at this moment; steps may have ended with some of them."""
        if self.is_over:
            return
        if self._observed is None:
            self._begin(_device())
        observed, steps = self._observed, self._steps
        assert observed is not None  # noqa: S101 - it was begun
        is_known = steps.anchor is not None
        now = None if is_known else observed.measurement.boundary()
        for optimizer, skipped in calls:
            key = self._key_of(optimizer)
            if now is not None:
                self._raw[steps.num_calls] = now
            ended = steps.call(key, type(optimizer).__name__, self._passes)
            if skipped:
                self._skipped.append(self._num_steps + 1)
            for call in ended:
                self._end_step(self._raw.get(call))
        if self._model is None and steps.num_calls >= _BUILT:
            self._model = Model.found()
        if steps.anchor is not None:
            self._raw.clear()
        if steps.is_over:
            raise EndedEarlyError(f"training {self._spec.training} of the script ended after {self._num_steps} steps")

    def _key_of(self, optimizer: Any) -> int:
        """Its own, also once another has its address."""
        key: int | None = optimizer.__dict__.get("_llmperf")
        if key is None:
            self._num_optimizers += 1
            key = optimizer.__dict__["_llmperf"] = self._num_optimizers
        return key

    # What becomes of it.

    def _begin(self, device: torch.device) -> None:
        spec, (rank, world) = self._spec, _place()
        if rank == 0:
            write_json(self._folder / ENVIRONMENT_FILE, codec.plain(environment(device)))
        (self._folder / f"rank-{rank}.pid").write_text(str(os.getpid()), encoding="ascii")
        self._rank, self._world, self._device = rank, world, device
        self._words = LastWords(self._folder, rank)
        self._beat = beat = Heartbeat(self._folder, rank, self._words)
        beat.steps = spec.steps
        beat.start()
        plan = Plan(
            steps=spec.steps,
            min_steps=spec.steps,
            warmup_steps=spec.warmup_steps,
            ranks=world,
            rank=rank,
            all_steps=True,
            is_ours=False,
            project=self._project,
        )
        memory: Memory | None = None if device.type == "cuda" else HostMemory(self._resident)
        self._observed = ObservedTraining(plan, device, beat, memory=memory)
        self._losses = _Losses(device)
        self._observed.begin()

    def _end_step(self, at: Boundary[Any] | None) -> None:
        if self.is_over:
            return
        observed = self._observed
        assert observed is not None  # noqa: S101 - it was begun
        self._num_steps += 1
        if self._num_steps == 1:
            self._first_step_seconds = time.time() - psutil.Process().create_time()
        came = observed.step_ended(self._num_steps, at)
        if came == "over" or (came == "measured" and not observed.go_on()):
            self._finish()

    def _finish(self) -> None:
        observed, model = self._observed, self._model or Model.found()
        assert observed is not None  # noqa: S101 - it was begun
        self.is_over = True
        trace = observed.trace()
        seen = self._evidence(evidence(model, self._spec, self._project, self._world))
        trained = observed.trained({}, keeps_losses=False, parameters=model.num_parameters, evidence=seen)
        seconds = (round(self._first_step_seconds, 6), *trained.record.step_seconds[1:])
        record = replace(trained.record, step_seconds=seconds, step_tokens=())
        counted = trained.record.step_tokens[self._spec.warmup_steps :]
        if counted:  # the first steps came before anybody counted
            usual = round(sum(counted) / len(counted))
            tokens = tuple(usual for _ in range(self._spec.warmup_steps)) + counted
            record = replace(record, tokens_per_step=usual, step_tokens=tokens if len(set(tokens)) > 1 else ())
        losses = trained.losses if self._losses and self._losses.are_known else ()
        share = Share(
            world=self._world,
            record=record,
            losses=losses,
            train_seconds=trained.train_seconds,
            parameters=trained.parameters,
            evidence=trained.evidence,
            trace=trace,
            loaded=loaded(),
        )
        assert self._beat is not None  # noqa: S101 - it was begun
        self._beat.write()
        write_json(self._folder / SHARE_FILE.format(self._rank), codec.plain(share))
        if self._spec.end == "park":
            _park()
        self._beat.stop()

    def _evidence(self, found: dict[str, Any]) -> dict[str, Any]:
        """``found``, and what was seen of the steps."""
        found = found | {"device_type": self._device.type}
        found |= {} if self._losses and self._losses.are_known else {"losses": "unknown"}
        found |= {"skipped_steps": self._skipped} if self._skipped else {}
        remarks = [*found.get("remarks", ()), *self._steps.notes]
        return found | ({"remarks": remarks} if remarks else {})

    def fail(self, error: BaseException) -> None:
        """The watching ends here; the launcher is told why."""
        self.is_over = True
        rank = getattr(self, "_rank", _place()[0])
        write_failure(self._folder, rank, error, "refused" if isinstance(error, EndedEarlyError) else "error")

    def script_failed(self, error: BaseException) -> None:
        """The script itself raised."""
        if not self.is_over:
            self.is_over = True
            kind = "oom" if isinstance(error, torch.OutOfMemoryError) else "error"
            write_failure(self._folder, getattr(self, "_rank", _place()[0]), error, kind)

    def script_ended(self) -> None:
        """The script came to its own end."""
        if self.is_over or self._observed is None:
            return
        wanted = self._spec.steps + TRACED_STEPS
        self.fail(
            EndedEarlyError(
                f"the script ended by itself after {self._num_steps} steps, expected {wanted} (steps="
                f"{self._spec.steps}, and {wanted - self._spec.steps} that are traced): let it train longer, or lower "
                "steps"
            )
        )


class EndedEarlyError(Exception):
    """The script made fewer steps than were to be measured."""


class _Losses:
    """One tensor, made at the start, so that what is kept is no growth of the training's."""

    def __init__(self, device: torch.device) -> None:
        self._kept = torch.zeros(_MOST_LOSSES, device=device)
        self._number = 0
        self.are_known = True
        """Whether each pass began from one number."""
        self.scale: torch.Tensor | None = None
        """By which a GradScaler multiplies them."""

    def keep(self, loss: torch.Tensor | None) -> torch.Tensor:
        slot = self._kept[self._number % _MOST_LOSSES]
        self._number += 1
        if loss is None:
            self.are_known = False
            return slot
        with torch.no_grad():
            slot.copy_(loss.detach().reshape(()))
            if self.scale is not None:
                slot.div_(self.scale)
        return slot


def _is_loss(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _device() -> torch.device:
    is_used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.device("cuda", torch.cuda.current_device()) if is_used else torch.device("cpu")


def _place() -> tuple[int, int]:
    """This process's rank, and the world's size."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _park() -> NoReturn:
    """Stay here until the launcher ends this process: nothing of the script runs any more."""
    while True:
        time.sleep(60)


# The hooks.


def watch(folder: str) -> None:
    """Torch has been imported in this process: hear of what trains in it."""
    path = Path(folder)
    values = json.loads((path / "request.json").read_text(encoding="utf-8"))
    spec = ScriptSpec(**values["spec"])
    if spec.seed is not None:
        _seed(spec.seed)
    rank = Rank(path, spec, Project.around(spec.folder(Path(values["root"]))))
    guarded = functools.partial(_guarded, rank)
    register_optimizer_step_post_hook(lambda optimizer, *_: guarded(rank.stepped, optimizer))
    _wrap_backward(rank, guarded)
    _wrap_scaler(rank, guarded)
    _hear_of_the_end(rank)


def _guarded(rank: Rank, ours: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if rank.is_over:
        return
    try:
        ours(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever we did wrong, the training is not ours to end
        with suppress(Exception):
            rank.fail(error)


def _wrap_backward(rank: Rank, guarded: Callable[..., None]) -> None:
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        guarded(rank.begin_pass, tensors)
        try:
            return backward(tensors, *args, **kwargs)
        finally:
            guarded(rank.end_pass)

    torch.autograd.backward = watched


def _wrap_scaler(rank: Rank, guarded: Callable[..., None]) -> None:
    """A scaler that skips a step calls no optimizer: the step has ended all the same."""
    step, scale = GradScaler.step, GradScaler.scale

    @functools.wraps(step)
    def watched(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = rank.num_calls
        result = step(self, optimizer, *args, **kwargs)
        if rank.num_calls == before:
            guarded(rank.stepped, optimizer, skipped=True)
        return result

    @functools.wraps(scale)
    def scaled(self: Any, outputs: Any) -> Any:
        result = scale(self, outputs)
        guarded(rank.scaled_by, getattr(self, "_scale", None))
        return result

    GradScaler.step, GradScaler.scale = watched, scaled


def _hear_of_the_end(rank: Rank) -> None:
    tell = sys.excepthook

    def excepthook(kind: Any, error: BaseException, traceback: Any) -> None:
        if not isinstance(error, KeyboardInterrupt):
            with suppress(Exception):
                rank.script_failed(error)
        tell(kind, error, traceback)

    sys.excepthook = excepthook
    atexit.register(lambda: _guarded(rank, rank.script_ended))


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
