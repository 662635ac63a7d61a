"""One node's part of a launch, started by srun: ``python -m …node_agent FOLDER SECONDS -- COMMAND``.

It runs torchrun on its node, watches the node's GPUs, keeps what a hanging rank was doing, reaps, and leaves in the
shared folder that it began (``node-NAME.json``) and how it ended (``node-NAME.end.json``). A node that left the first
and not the second is one that failed.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from pytest_llmperf.launch import hang_report, process
from pytest_llmperf.launch.health import HealthWatch
from pytest_llmperf.launch.machine import find_machine
from pytest_llmperf.launch.progress_reader import ProgressReader
from pytest_llmperf.launch.slurm.node_info import node_name, switch
from pytest_llmperf.support.files import write_text

TIMED_OUT = 124
UNWRITABLE = 74
"""A word that cannot be left in the folder is told by the exit code, the only other way to the launcher."""
_ENDED_BY_SIGNAL = 143
SCRATCH = "LLMPERF_SCRATCH"

# Compilers keep what they made here: on a shared file system every rank of every node would fight for it.
_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


class _SignalledError(Exception):
    """Somebody ends this step: scancel, preemption, the time limit, or the launcher."""


def main(arguments: Sequence[str]) -> int:
    """Run this node's part; the exit code is torchrun's, or says that the time was over or the folder not writable."""
    folder, seconds, command = Path(arguments[0]), float(arguments[1]), list(arguments[3:])
    name = node_name()
    signal.signal(signal.SIGTERM, _on_signal)
    if not _left(folder / f"node-{name}.json", {"node": name, "host": platform.node(), "switch": switch()}):
        return UNWRITABLE
    command = [word.replace("@node@", name) for word in command]
    with _scratch() as variables:
        ended = _run(folder, name, seconds, command, {**os.environ, **variables})
    return int(ended["returncode"]) if _left(folder / f"node-{name}.end.json", ended) else UNWRITABLE


def _left(path: Path, word: Mapping[str, Any]) -> bool:
    """Whether this word could be left for the launcher; why not is told to srun."""
    try:
        write_text(path, json.dumps(word), lasts=False)
    except OSError as error:
        sys.stderr.write(f"llmperf: {error}\n")
        return False
    return True


def _run(folder: Path, name: str, seconds: float, command: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
    start = time.monotonic()
    progress = ProgressReader(folder / "progress.json", lambda _: None)
    gpus = find_machine().gpus
    with HealthWatch(gpus, lambda: folder.glob("rank-*.pid")) as watched:
        answer: dict[str, Any] = {"returncode": _ENDED_BY_SIGNAL, "timed_out": False, "signalled": False}
        try:
            log = folder / f"torchrun-{name}.log"
            ended = process.watch(
                lambda: process.start(command, environment=environment, log=log),
                timeout_seconds=seconds,
                pid_files=lambda: (),  # of ranks on all nodes: their pids mean nothing here, our own are our children
                poll=lambda: watched.look(progress.poll()),
                at_timeout=lambda: hang_report.ask(folder, name),
            )
            # A signal's number is none that an exit code can hold.
            answer["returncode"] = ended.returncode if ended.returncode >= 0 else 128 - ended.returncode
            if ended.timed_out:
                answer |= {"returncode": TIMED_OUT, "timed_out": True}
        except _SignalledError:
            answer |= {"signalled": True}
        except OSError as error:
            answer |= {"returncode": 127, "error": f"{command[0]}: {error}"}
        watched.look(progress.read())
        return {**answer, "node": name, "seconds": time.monotonic() - start, "health": asdict(watched.health())}


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SLURM repeats itself, and the reaping must come to its end
    raise _SignalledError


@contextmanager
def _scratch() -> Iterator[dict[str, str]]:
    """A folder of this node for this launch, and one that the job's launches share; empty where none can be made."""
    wanted = os.environ.get(SCRATCH) or os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - node-local by its nature
    home = Path(os.path.expandvars(wanted)) / f"llmperf-{os.getuid()}-{os.environ.get('SLURM_JOB_ID', '')}"
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = tempfile.mkdtemp(prefix="launch-", dir=home)
    except OSError:
        yield {}
        return
    try:
        yield {"TMPDIR": folder} | {
            name: str(home / cache) for name, cache in _CACHES.items() if name not in os.environ
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
