"""``python -m pytest_llmperf.worker.estimate``: the memory that specs will need, each predicted in a fork of its own.

Standard input holds a request a line, until its end: ``{"spec", "model_config"}``. Standard output gets an answer a
line as soon as it is known: ``{"number": of the request, from 0, "parts": {…}}``, or an ``error`` in the parts' place.
A request of ``{"model_config", "sequence_length"}`` is for arithmetic, and has ``flops_per_token`` in that place.
A process for each, since Liger patches classes for good; forked, since imports take longer than most predictions.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.worker.estimate.arithmetic import model_flops
from pytest_llmperf.worker.estimate.memory_estimator import plan

# A prediction takes one core and 1 GB.
_AT_ONCE = 4

# Whatever the first prediction of a process imports and looks up is there for all.
_FIRST = TrainSpec(model="llama-tiny", sequence_length=16, micro_batch_size=1)


def main() -> int:
    """See above."""
    requests = [json.loads(line) for line in sys.stdin if line.strip()]
    if len(requests) > 1:
        with suppress(Exception):  # what is wrong is each one's own to tell
            plan(_FIRST, _FIRST.architecture.config)
    gc.collect()
    gc.freeze()  # to look through what the imports have made, again and again, is a sixth of the time
    if len(requests) == 1:
        _tell(0, _answer(requests[0]))
    else:
        _fork_each(requests, min(_AT_ONCE, len(os.sched_getaffinity(0))))
    return 0


def _fork_each(requests: Sequence[Mapping[str, Any]], most: int) -> None:
    """Answer all ``requests``, ``most`` of them at once."""
    waiting, running = [*enumerate(requests)], dict[int, int]()
    while waiting or running:
        while waiting and len(running) < most:
            number, request = waiting.pop(0)
            pid = os.fork()
            if not pid:
                _end_with_answer(number, request)
            running[pid] = number
        pid, status = os.wait()
        number = running.pop(pid)
        if status:
            _tell(number, {"error": f"its process ended with {os.waitstatus_to_exitcode(status)}"})


def _end_with_answer(number: int, request: Mapping[str, Any]) -> None:
    """In the fork: nothing of its parent's is to happen twice."""
    try:
        _tell(number, _answer(request))
        os._exit(0)
    except BaseException:  # noqa: BLE001 - Ctrl-C too
        traceback.print_exc()
        os._exit(1)


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if "sequence_length" in request:
            return {"flops_per_token": model_flops(request["model_config"], request["sequence_length"])}
        return {"parts": plan(TrainSpec.from_dict(request["spec"]), request["model_config"])}
    except Exception as error:  # noqa: BLE001 - a model's own code may raise anything, and who asked wants one line
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "  # 'x' alone says nothing
        return {"error": kind + " ".join(str(error).split())}


def _tell(number: int, answer: Mapping[str, Any]) -> None:
    # In one piece: several processes write to the same pipe.
    os.write(sys.stdout.fileno(), (json.dumps({"number": number, **answer}) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
