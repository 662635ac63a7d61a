"""A count of a model's FLOPs, by a process that needs no GPU and imports torch in this one's place."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from pytest_llmperf.spec.models import Model

# Imports included, which take most of it.
_SECONDS = 300
# Others may train beside it, on this host's other GPUs.
_NICENESS = 10
# Where the process ended before it could say what is wrong: a traceback's last word.
_ERROR = re.compile(r"^([\w.]+(?:Error|Exception): .*)$", re.MULTILINE)
_LONGEST_ERROR = 200
_PACKAGE_PARENT = Path(__file__).parents[2]


class CountError(Exception):
    """A model's FLOPs cannot be counted: one line."""


def counted_flops(model: Model, sequence_length: int) -> float:
    """Training FLOPs of ``model`` for one token of a full sequence.

    Raises:
        CountError: transformers does not have the model, or its code does not run on tensors without content.
    """
    request = {"model_config": dict(model.config), "sequence_length": sequence_length}
    path = os.pathsep.join([str(_PACKAGE_PARENT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # A GPU that happens to be here would only be woken up.
    fixed = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "pytest_llmperf.worker.estimate"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **fixed},
        start_new_session=True,  # Ctrl-C is this process's to tell
    ) as process:
        try:
            with suppress(OSError):  # it may have ended
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
            told, said = process.communicate(json.dumps(request).encode() + b"\n", timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise CountError(f"no answer after {_SECONDS} s") from None
        finally:
            process.kill()
    return _flops(told.decode(errors="replace"), said.decode(errors="replace"), process.returncode)


def _flops(told: str, said: str, returncode: int) -> float:
    """What the process answered, or why it did not."""
    for line in reversed(told.splitlines()):
        with suppress(ValueError):  # a library may print, too
            answer = json.loads(line)
            if isinstance(answer, dict) and "flops_per_token" in answer:
                return float(answer["flops_per_token"])
            if isinstance(answer, dict) and "error" in answer:
                raise CountError(_shortened(str(answer["error"])))
    errors = _ERROR.findall(said)
    raise CountError(_shortened(errors[-1]) if errors else f"it ended with exit code {returncode} and said nothing")


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}..."
