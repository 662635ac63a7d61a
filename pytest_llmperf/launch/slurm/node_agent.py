"""One node's part of a launch, started by srun: ``python -m …node_agent FOLDER SECONDS [OFFER] -- COMMAND``.

It runs torchrun on its node (COMMAND, or a fork of the node's server that OFFER names), watches the node's GPUs, keeps
what a hanging rank was doing, reaps, and leaves in the shared folder that it began (``node-NAME.json``) and how it
ended (``node-NAME.end.json``). A node that left the first and not the second is one that failed.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from pytest_llmperf.launch import process
from pytest_llmperf.launch.device import Gpu, shown
from pytest_llmperf.launch.forked_agent import (
    ColdStartError,
    Conversation,
    ForkedAgent,
    LaunchOrder,
    LostServerError,
    NoAnswerError,
)
from pytest_llmperf.launch.machine import find_machine
from pytest_llmperf.launch.request import BEFORE_WORDS
from pytest_llmperf.launch.scratch import UNWRITABLE, scratch
from pytest_llmperf.launch.script import ScriptLaunch
from pytest_llmperf.launch.slurm.cluster import node_name, switch
from pytest_llmperf.launch.slurm.node_server import connected, process_namespace
from pytest_llmperf.launch.slurm.node_servers import Offer
from pytest_llmperf.launch.watch import HealthWatch, ProgressReader
from pytest_llmperf.support.files import write_text

TIMED_OUT = 124
_ENDED_BY_SIGNAL = 143
# Imports on the first node of a night take minutes; the server itself gives up before.
_FORK_SECONDS = 330.0


class _SignalledError(Exception):
    """Somebody ends this step: scancel, preemption, the time limit, or the launcher."""


def main(arguments: Sequence[str]) -> int:
    """Run this node's part; the exit code is torchrun's, or says that the time was over or the folder not writable."""
    folder, seconds, at = Path(arguments[0]), float(arguments[1]), [*arguments].index("--")
    name = node_name()
    signal.signal(signal.SIGTERM, _on_signal)
    if not _left(folder / f"node-{name}.json", {"node": name, "host": platform.node(), "switch": switch()}):
        return UNWRITABLE
    command = [word.replace("@node@", name) for word in arguments[at + 1 :]]
    with scratch(of_job=True) as place:
        environment, script = {**os.environ, **place.variables}, ScriptLaunch.left_in(folder)
        environment = script.environment(environment) if script else environment
        part = _Part(folder, name, command, environment, find_machine().gpus, script)
        ended = _run(part, Offer.from_words(arguments[2:at]), seconds)
        place.is_whole = ended["returncode"] == 0
    return int(ended["returncode"]) if _left(folder / f"node-{name}.end.json", ended) else UNWRITABLE


def _left(path: Path, word: Mapping[str, Any]) -> bool:
    """Whether this word could be left for the launcher; why not is told to srun."""
    try:
        write_text(path, json.dumps(word), lasts=False)
    except OSError as error:
        sys.stderr.write(f"llmperf: {error}\n")
        return False
    return True


@dataclass(frozen=True)
class _Part:
    """What this node does of a launch."""

    folder: Path
    node: str
    command: Sequence[str]
    environment: Mapping[str, str]
    gpus: tuple[Gpu, ...]
    script: ScriptLaunch | None

    @property
    def log(self) -> Path:
        return self.folder / f"torchrun-{self.node}.log"


def _run(part: _Part, offer: Offer | None, seconds: float) -> dict[str, Any]:
    start = time.monotonic()
    progress = ProgressReader(part.folder / "progress.json", lambda _: None)
    answer: dict[str, Any] = {"returncode": _ENDED_BY_SIGNAL, "timed_out": False, "signalled": False}
    with HealthWatch(part.gpus, part.folder) as watched:
        try:
            agent, how, server = _forked(part, offer, seconds)
            answer |= how
            if agent is None and offer is not None and offer.is_required:
                why = f"--perf-start warm: it can only begin cold: on node {part.node}: {how['cold_because']}"
                answer |= {"returncode": 1, "error": why}
            else:
                script, left = part.script, seconds - (time.monotonic() - start)
                where, begin = script.work if script else None, process.start
                asks = {"at_timeout": lambda torchrun: process.ask_ranks(part.folder, torchrun, part.node)}
                ended = process.watch(
                    lambda: agent or begin(part.command, environment=part.environment, log=part.log, folder=where),
                    timeout_seconds=left,
                    poll=lambda: watched.look(progress.poll()),
                    **(script.ends(left, progress, part.node) if script else asks),
                )
                ended = script.closed(ended, part.gpus) if script else ended
                # A signal's number is none that an exit code can hold.
                answer["returncode"] = ended.returncode if ended.returncode >= 0 else 128 - ended.returncode
                answer["lost_server"] = agent is not None and agent.lost_server
                if answer["lost_server"] and server:
                    process.kill_with_children(server)  # it may live, and not run
                if ended.timed_out:
                    answer |= {"returncode": TIMED_OUT, "timed_out": True}
        except _SignalledError:
            answer |= {"signalled": True}
        except OSError as error:
            answer |= {"returncode": 127, "error": f"{part.command[0]}: {error}"}
        watched.look(progress.read())
        health = asdict(watched.health())
    return {**answer, "node": part.node, "seconds": time.monotonic() - start, "health": health}


def _forked(
    part: _Part, offer: Offer | None, seconds: float
) -> tuple[ForkedAgent | None, dict[str, Any], psutil.Process | None]:
    """This node's torchrun, begun warm within so many seconds, or ``None``; how it begins; its server."""
    if offer is None:
        return None, {"start": "cold"}, None
    server: psutil.Process | None = None
    try:
        channel, server = connected(f"{offer.name}-{part.node}")
        # By their names of everywhere: the server's step may number them otherwise.
        order = LaunchOrder(
            torchrun=part.command[BEFORE_WORDS:],
            environment={**part.environment, **shown(part.gpus)},
            needs=offer.needs,
            log=part.log,
        )
        use = {
            "python": part.command[0],
            "on_gpu": bool(part.gpus),
            "folder": os.getcwd(),  # noqa: PTH109 - a string is wanted
            "homes": [process.package_path(), str(part.folder / process.OTHER_PATH)],
            "processes": process_namespace(),
        }
        agent = Conversation(channel).launch(order, min(_FORK_SECONDS, seconds / 2), lambda: None, use)
    except ColdStartError as error:
        if isinstance(error, NoAnswerError) and server:
            process.kill_with_children(server)
        is_gone = isinstance(error, LostServerError)
        return None, {"start": "cold", "cold_because": str(error), "is_server_gone": is_gone}, None
    return agent, {"start": "warm"}, server


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SLURM repeats itself, and the reaping must come to its end
    raise _SignalledError


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
