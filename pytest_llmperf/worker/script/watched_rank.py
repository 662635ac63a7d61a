"""One rank of a user's own training, as hooks tell of it: where its steps end, its losses, tokens, memory and trace.

Nothing waits for the device while steps are timed. After its last step a rank leaves its share of the record and stays
where it is: the launcher ends it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

import psutil
import torch

from pytest_llmperf.observe.environment import Project, environment, numel
from pytest_llmperf.observe.measurement import Boundary, Memory
from pytest_llmperf.observe.tracer import TRACED_STEPS, is_profiled
from pytest_llmperf.observe.training import ObservedTraining, Plan
from pytest_llmperf.observe.vital_signs import Heartbeat, LastWords
from pytest_llmperf.records.launch import ENVIRONMENT_FILE, SHARE_FILE, RankRecord, diary_of
from pytest_llmperf.records.ranks import ASKS, Share, write_json
from pytest_llmperf.settings.spec import ScriptSpec
from pytest_llmperf.worker.imports import loaded
from pytest_llmperf.worker.script.model import Model, evidence
from pytest_llmperf.worker.script.steps import Steps, StepsError

# Where an optimizer has its number: its address may become another's.
_NUMBER = "_llmperf"
# Backward passes of which losses are kept: those of the timed steps, unless a step has a hundred and more.
_MOST = 4096
_Moment: TypeAlias = tuple[Boundary, float, bool]


class AnotherRankError(Exception):
    """Another process of the command is this rank."""


class Losses:
    """Places made at the start, so that what is kept is no growth of the training's."""

    def __init__(self, device: torch.device) -> None:
        self._places = list(torch.zeros(_MOST, 1, device=device, dtype=torch.float32))
        self._number = 0
        self.are_known = True
        """Whether each pass began from one number, and all of them have a place."""

    def keep(self, loss: torch.Tensor | None) -> torch.Tensor:
        """Return where ``loss`` is kept; ``None``: a pass did not begin from one number."""
        self.are_known = self.are_known and loss is not None and self._number < _MOST
        if loss is None or not self.are_known:
            return self._places[0]
        place = self._places[self._number]
        self._number += 1
        return place.copy_(loss.reshape(1))


class Watched:
    """A process that trains: where its steps end, by backward passes and calls of optimizers."""

    def __init__(self, spec: ScriptSpec) -> None:
        self.number, self._world = place()
        self._steps = Steps(spec.step)
        self._model: Model | None = None
        self._passes = self._num_steps = self._num_optimizers = 0

    def is_aside(self, optimizer: Any) -> bool:
        """Whether a call of ``optimizer`` says nothing: there may be hundreds in one backward pass."""
        return self._steps.is_aside(vars(optimizer).get(_NUMBER), self._passes)

    def _ended_by(self, optimizer: Any) -> list[int]:
        """The calls, by their numbers, of which a call of ``optimizer`` shows that a step ended with them."""
        attributes = vars(optimizer)
        if _NUMBER not in attributes:  # its own, also once another has its address
            self._num_optimizers += 1
            attributes[_NUMBER] = self._num_optimizers
        return self._steps.call(attributes[_NUMBER], type(optimizer).__name__, self._passes)

    def _new_tokens(self) -> int:
        return self._model.tokens() if self._model else 0


class Rank(Watched):
    """It begins with its first backward pass."""

    def __init__(self, folder: Path, spec: ScriptSpec, project: Project, device: torch.device, resident: int) -> None:
        """``resident``: bytes of the process before it had a model."""
        super().__init__(spec)
        self._folder, self._spec, self._project, self._device = folder, spec, project, device
        self._pid_file, self._steps_file = folder / f"rank-{self.number}.pid", folder / f"steps-{self.number}.pid"
        self._environment = environment(device) if self.number == 0 else None
        self._beat = Heartbeat(folder, self.number, LastWords(folder, os.getpid(), ASKS), has_parent=False)
        self._beat.steps, self._beat.has_place = spec.steps, lambda: self.has_place
        if not self._pid_file.exists():
            self._take_place()
        memory = Memory(resident) if device.type == "cpu" else None
        how: dict[str, Any] = {"min_steps": spec.steps, "all_steps": True, "is_ours": False, "project": project}
        how["diary"] = diary_of(folder, self.number)
        plan = Plan(steps=spec.steps, warmup_steps=spec.warmup_steps, ranks=self._world, rank=self.number, **how)
        self._observed = ObservedTraining(plan, device, self._beat, memory=memory)
        self.fetched = self._observed.fetched
        self._measurement = self._observed.measurement
        self.losses = Losses(device)
        self._pass: tuple[torch.Tensor | None, int] = None, 0  # the loss and tokens of the one that runs
        # Calls, by their numbers, of which it is not known yet whether a step ended with them: when, and if profiled.
        self._moments: dict[int, _Moment] = {}
        self._skips: list[int] = []  # such calls, since the last step
        self._skipped_steps: list[int] = []
        self._is_cut = False
        self._profiled_steps = 0  # by the script's own profiler
        self._first_step_seconds = 0.0
        self._observed.begin()

    def _take_place(self) -> None:
        write_json(self._pid_file, os.getpid())
        if self._environment:
            write_json(self._folder / ENVIRONMENT_FILE, self._environment)
        self._beat.words = LastWords(self._folder, self.number, ASKS)
        self._beat.start()

    def _keep_place(self) -> None:
        """Of several processes that train under one number the first is the rank, unless it has gone or is a child.
        What a script starts beside its own training may go backward, and even train, before that begins."""
        with suppress(psutil.NoSuchProcess, OSError, ValueError):
            first = psutil.Process(int(self._steps_file.read_text(encoding="ascii")))
            if os.getpid() not in {one.pid for one in first.parents()}:
                raise AnotherRankError
        write_json(self._steps_file, os.getpid())
        if not self.has_place:
            self._take_place()

    @property
    def has_place(self) -> bool:
        """Whether no other process is the rank."""
        return self._pid_file.exists() and self._pid_file.read_text(encoding="ascii") == str(os.getpid())

    def may_tell(self, _: BaseException) -> bool:
        """Whether why this process ended is the rank's reason."""
        return self.has_place

    @property
    def has_stepped(self) -> bool:
        return self._steps.num_calls > 0

    def leave(self) -> None:
        """Another process may be the rank."""
        self._pid_file.unlink()
        self._steps_file.unlink(missing_ok=True)

    # What hooks tell of.

    def pass_begins(self, loss: torch.Tensor | None) -> None:
        """A backward pass, from ``loss``; ``None``: not from one number."""
        self._passes += 1
        self._pass = None if loss is None else loss.data, self._new_tokens()  # no operator of ours is traced

    def pass_ended(self, *, is_whole: bool) -> None:
        """``is_whole``: it raised nothing, so that a step may come of it."""
        (loss, tokens), self._pass = self._pass, (None, 0)
        if is_whole and not self._measurement.is_over:  # a traced step shows the script's own work alone
            self._measurement.end_pass(self.losses.keep(loss), tokens, None)
        self._new_tokens()  # what was computed a second time is no work of another pass

    def called(self, calls: Sequence[tuple[Any, bool]]) -> bool:
        """``calls`` of optimizers ended at this moment, each with whether infinite gradients skipped it; whether
        the last step has ended with them."""
        moment = None
        if not self._passes:  # gradients come another way
            self._measurement.end_pass(None, self._new_tokens(), None)
        if not self._steps.is_settled:
            moment = self._measurement.boundary(), time.time(), is_profiled()
            self._beat.step = self._num_steps or self._steps.num_steps + 1  # as far as anybody can tell
        if not self._steps.num_calls:
            self._keep_place()
        if any(self._ends_the_last_step(*call, moment) for call in calls):
            return True
        if self._steps.is_settled:
            self._moments.clear()
        if self._model is None:
            self._model = Model.found()
            self.losses.are_known = self.losses.are_known and not self._model.scales_losses
        if self._steps.is_over and not self._measurement.is_over:
            raise self._ended_early("the first training of the script")
        self._is_cut = self._steps.is_over  # another one began while its steps were traced
        return self._is_cut

    def _ends_the_last_step(self, optimizer: Any, is_skipped: bool, moment: _Moment | None) -> bool:
        number = self._steps.num_calls
        self._skips += [number] * is_skipped
        if moment is not None:
            self._moments[number] = moment
        for ended in self._ended_by(optimizer):
            if self._end_step(ended):
                return True
            if self._measurement.is_over:
                break  # what ended after the last timed step, before that was known, is not traced
        return False

    def _end_step(self, call: int) -> bool:
        """With that ``call``; whether no step comes any more."""
        boundary, now, was_profiled = self._moments.get(call) or (None, time.time(), is_profiled())
        self._num_steps += 1
        if self._num_steps == 1:
            self._first_step_seconds = now - psutil.Process().create_time()
        if self._skips and self._skips[0] <= call:
            self._skipped_steps.append(self._num_steps)
            self._skips = [each for each in self._skips if each > call]
        self._profiled_steps += was_profiled and not self._measurement.is_over
        came = self._observed.step_ended(self._num_steps, boundary)
        return came == "over" or (came == "measured" and not self._observed.go_on())

    # What becomes of it.

    def finish(self, remarks: Iterable[str], *, is_ended: bool = False) -> None:
        """Leave its share, unless another process is the rank; ``is_ended``: the script is over by itself."""
        if not self.has_place:
            return
        parks = self._spec.end == "park" and not is_ended
        if parks:
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that guards the script's steps has none to guard
        observed, model = self._observed, self._model or Model.found()
        trace = observed.trace(StepsError("the training ended before") if is_ended or self._is_cut else None)
        seen = evidence(model, self._spec, self._project, self._world)
        number = sum(numel(parameter) for root in model.roots for parameter in root.parameters())
        trained = observed.trained({}, keeps_losses=False, parameters=number, evidence=seen)
        trained = replace(
            trained,
            record=self._record(trained.record),
            losses=trained.losses if self.losses.are_known else (),
            evidence=self._evidence(trained.evidence, trained.record, remarks),
        )
        self._beat.write()
        share = Share(world=self._world, trained=trained, trace=trace, loaded=loaded())
        write_json(self._folder / SHARE_FILE.format(self.number), share)
        while parks:
            time.sleep(60)  # nothing of the script runs any more, until the launcher ends this process
        self._beat.stop()

    def _record(self, record: RankRecord) -> RankRecord:
        """``record``, whose first step begins with the process, and in whose first ones nobody counted tokens."""
        record = replace(record, step_seconds=(round(self._first_step_seconds, 6), *record.step_seconds[1:]))
        if not any(record.step_tokens):
            return record
        usual = round(fmean(tokens for tokens in record.step_tokens if tokens))
        all_ = tuple(tokens or usual for tokens in record.step_tokens)
        return replace(record, tokens_per_step=usual, step_tokens=all_ if len(set(all_)) > 1 else ())

    def _evidence(self, found: Mapping[str, Any], record: RankRecord, remarks: Iterable[str]) -> dict[str, Any]:
        """``found``, and what was seen of the steps."""
        said = [*found.get("remarks", ()), *remarks, *self._steps.notes]
        if self._profiled_steps:
            said.append(f"a profiler of the script's own ran in {self._profiled_steps} timed steps: they hold its cost")
        is_counted = 0 not in record.step_tokens[self._spec.warmup_steps :]
        return {
            **found,
            "device_type": self._device.type,
            **({} if is_counted else {"tokens": "unknown"}),
            **({} if self.losses.are_known and self._passes else {"losses": "unknown"}),
            **({"skipped_steps": self._skipped_steps} if self._skipped_steps else {}),
            **({"remarks": said} if said else {}),
        }

    def script_ended(self, remarks: Iterable[str]) -> None:
        """By itself: what was timed stands, without a trace. StepsError: not all steps were timed."""
        if self._measurement.is_over:
            self.finish(remarks, is_ended=True)
            return
        if not self.has_stepped:
            raise StepsError(
                f"{self._passes} backward passes and no call of an optimizer were seen; expected one of torch.optim or "
                "of a class made of torch.optim.Optimizer: steps of others cannot be counted"
            )
        raise self._ended_early("the script")

    def _ended_early(self, what: str) -> StepsError:
        came, steps = self._num_steps or self._steps.num_steps, self._spec.steps
        if diary_of(self._folder, self.number):
            return StepsError(f"{what} ended by itself after {came} steps: let it train longer, or soak for less time")
        return StepsError(
            f"{what} ended by itself after {came} steps, expected {steps + TRACED_STEPS} (steps={steps}, and "
            f"{TRACED_STEPS} that are traced): let it train longer, or lower steps"
        )


def place() -> tuple[int, int]:
    """This process's rank, and the world's size."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
