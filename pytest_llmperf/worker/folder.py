"""A launch's folder as its ranks have it, without torch: ``request.json`` in; why a rank failed out."""

from __future__ import annotations

import fcntl
import json
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pytest_llmperf.records.launch import TURN_FILE, Asked
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec
from pytest_llmperf.support.files import write_text
from pytest_llmperf.support.redaction import without_secrets


@dataclass(frozen=True, kw_only=True)
class Request(Asked):
    """Beside what torchrun says in the environment."""

    spec: TrainSpec
    folder: Path
    model_config: Mapping[str, Any]
    calibrations: str = ""
    """The folder of the GPUs' calibrations; empty: none is asked for."""
    recipe: str = "huggingface"
    """Who trains: a module of ``worker/recipes``."""

    def await_turn(self, enter: Callable[[str], None]) -> None:
        """Until the launch before has left the device: so long this one's launcher has the file locked, if there."""
        with suppress(FileNotFoundError), (self.folder / TURN_FILE).open("rb") as file:
            enter("yielding")
            fcntl.flock(file, fcntl.LOCK_SH)
            enter("preparing")

    @classmethod
    def read(cls, folder: Path) -> Request:
        values = json.loads((folder / "request.json").read_text(encoding="utf-8"))
        asked = codec.read(Asked, {one.name: values[one.name] for one in fields(Asked) if one.name in values})
        return cls(**values | vars(asked) | {"spec": TrainSpec.from_dict(values["spec"]), "folder": folder})


class RefusedError(ValueError):
    """A model that cannot be trained as it was asked for: one line with what to write instead."""


_LONGEST_MESSAGE = 300


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(codec.plain(value)), lasts=False)


def write_failure(folder: Path, rank: int, error: BaseException, kind: str, how: str = "") -> None:
    """Leave the reason of this rank's end; the earliest one written is the root cause, its peers only saw it. A refusal
    is its own line and nothing else. ``how`` is known that memory ran out, where ``error`` does not say so."""
    message, lines = str(error), list[str]()
    if kind != "refused":
        # The first line alone may only announce what the others say; what is cut is no longer known for a secret.
        said = without_secrets(" ".join(filter(None, map(str.strip, message.splitlines()))) or "no message")
        # CUDA's out-of-memory message goes on about allocator settings; the log has it all.
        said = said if len(said) <= _LONGEST_MESSAGE else f"{said[:_LONGEST_MESSAGE]}..."
        message = f"rank {rank}: {type(error).__name__}: {said}"
        lines = "".join(traceback.format_exception(error)).splitlines()
    if how:
        message = f"{message}; taken for a lack of memory: {how}"
    tail = [line for line in lines if line.strip()][-12:]
    failure = {"kind": kind, "message": message, "tail": tail, "time": time.time()}
    write_json(folder / f"failure-{rank}.json", failure)
