"""The run folder as the worker writes it: every file appears whole or not at all."""

from __future__ import annotations

import json
import time
import traceback
from pathlib import Path
from typing import Any

from pytest_llmperf.support.files import write_text
from pytest_llmperf.support.redaction import without_secrets

_LONGEST_MESSAGE = 300


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` so that a reader sees the old file or the new one, never a part."""
    write_text(path, json.dumps(value), lasts=False)


def write_failure(folder: Path, rank: int, error: BaseException, kind: str, how: str = "") -> None:
    """Leave the reason of this rank's end; the earliest one written is the root cause, its peers only saw it.

    A refusal is its own line and nothing else: no rank erred, and where in the code it was said helps nobody. ``how``
    is how it is known that memory ran out, where ``error`` does not say so itself.
    """
    refused = kind == "refused"
    lines = [] if refused else "".join(traceback.format_exception(error)).splitlines()
    message = str(error) if refused else f"rank {rank}: {type(error).__name__}: {_one_line(error)}"
    if how:
        message = f"{message}; taken for a lack of memory: {how}"
    write_json(
        folder / f"failure-{rank}.json",
        {
            "kind": kind,
            "message": message,
            "tail": [line for line in lines if line.strip()][-12:],
            "time": time.time(),
        },
    )


def _one_line(error: BaseException) -> str:
    # The first line alone may only announce what the others say.
    line = " ".join(line.strip() for line in str(error).splitlines() if line.strip()) or "no message"
    line = without_secrets(line)  # what is cut is no longer known for a secret
    # CUDA's out-of-memory message goes on about allocator settings; the log has it all.
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]}..."
