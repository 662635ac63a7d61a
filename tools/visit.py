"""A visit to a GPU host by a plan: lanes of commands side by side, each on GPUs of its own, within a time.

    python -m tools.visit tools/visits/two-gpus-1.toml... --out DIRECTORY --seconds 570 [--from NAME] [--rehearse]

A plan is a TOML file of ``[[lane]]`` tables, each with ``gpus`` (``CUDA_VISIBLE_DEVICES``) and ``steps``, tables of
``name``, ``seconds`` at most, ``run`` and, where wanted, ``env``. A second plan beside it takes the next GPUs.
``{out}`` and ``{baselines}`` in a command are filled in: a lane has its own copy of ``baselines/``, its own cache and
leases, so that lanes do not wait for one another, and keeps them over calls. A step for which too little time is left
is not begun; one that takes longer gets Ctrl-C, as a user would press, and counts as a failure, as one that was not
begun does. DIRECTORY has a log of each step, ``visit.json`` and ``visit.tgz`` of all of it with the baselines that
the lanes changed. ``--rehearse`` prints what would run, and makes a dry run of each pytest.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).parents[1]
# As a shell says it of a program that is not there.
_GRACE_SECONDS, _NOT_STARTED = 15.0, 127


def read_plans(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The lanes of some plans; those of each have the GPUs after those of the plan before."""
    lanes, before = list[dict[str, Any]](), 0
    for path in paths:
        found = tomllib.loads(path.read_text(encoding="utf-8"))["lane"]
        for lane in found:
            lane["gpus"] = [int(gpu) + before for gpu in str(lane["gpus"]).split(",")]
        before = 1 + max(gpu for lane in found for gpu in lane["gpus"])
        lanes += found
    return lanes


class Lane:
    """One row of steps, in a thread of its own."""

    def __init__(self, number: int, plan: dict[str, Any], out: Path, until: float) -> None:
        self.number, self._steps, self._until, self._out = number, plan["steps"], until, out
        self.home = Path(tempfile.gettempdir()) / f"llmperf-lane-{number}"
        self.baselines = self.home / "baselines"
        if not self.baselines.exists():
            shutil.copytree(REPOSITORY / "baselines", self.baselines)
        self._environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, plan["gpus"])),
            "LLMPERF_CACHE_DIR": str(self.home / "cache"),
            "LLMPERF_LEASE_DIR": str(self.home / "leases"),
            "PYTHONUNBUFFERED": "1",
        }
        self.done: list[dict[str, Any]] = []

    def command(self, step: dict[str, Any]) -> list[str]:
        return shlex.split(step["run"].format(out=self._out, baselines=self.baselines))

    def run(self) -> None:
        for step in self._steps:
            left = self._until - time.monotonic()
            row = {"lane": self.number, "name": step["name"], "seconds": 0.0, "code": None}
            self.done.append(row)
            if left < min(step["seconds"], step.get("least", step["seconds"])):
                continue
            begun = time.monotonic()
            row["code"] = self._call(step, min(step["seconds"], left))
            row["seconds"] = round(time.monotonic() - begun, 1)
            print(f"visit: {row}", flush=True)

    def _call(self, step: dict[str, Any], seconds: float) -> int:
        environment = self._environment | {name: str(value) for name, value in step.get("env", {}).items()}
        with (self._out / f"{step['name']}.log").open("wb") as log:
            try:
                called = subprocess.Popen(
                    self.command(step), cwd=REPOSITORY, env=environment, stdout=log, stderr=log, start_new_session=True
                )
            except OSError as error:  # no such program: the lane's other steps are run all the same
                log.write(f"{error}\n".encode())
                return _NOT_STARTED
            for wait, sent in ((seconds, signal.SIGINT), (_GRACE_SECONDS, signal.SIGKILL)):
                try:
                    return called.wait(wait)
                except subprocess.TimeoutExpired:
                    os.killpg(called.pid, sent)
            return called.wait()


def rehearsed(lanes: Sequence[Lane], plans: Sequence[dict[str, Any]]) -> int:
    """Print each command; of a pytest's the cases that it would launch. The number of commands that are refused."""
    wrong = 0
    for lane, rows in zip(lanes, plans, strict=True):
        for step in rows["steps"]:
            words = lane.command(step)
            print(f"lane {lane.number}, {step['seconds']:4} s: {shlex.join(words)}")
            if "pytest" in words[:3]:
                asked = subprocess.run(
                    [sys.executable, "-m", *words[words.index("pytest") :], "--perf-dry-run"],
                    cwd=REPOSITORY,
                    capture_output=True,
                    text=True,
                    check=False,
                )
                print("   ", *(asked.stdout.strip().splitlines()[-1:] or [asked.stderr[-500:]]))
                wrong += asked.returncode != 0
    return wrong


def packed(out: Path, lanes: Sequence[Lane]) -> None:
    """All that the visit leaves, in one file."""
    with tarfile.open(out / "visit.tgz", "w:gz") as tar:
        for path in sorted(out.iterdir()):
            if path.name != "visit.tgz":
                tar.add(path, path.name)
        for lane in lanes:
            for path in lane.baselines.rglob("*.json"):
                stored = REPOSITORY / "baselines" / path.relative_to(lane.baselines)
                if not stored.exists() or stored.read_bytes() != path.read_bytes():
                    tar.add(path, Path(f"lane-{lane.number}") / path.relative_to(lane.home))


def main(words: Sequence[str]) -> int:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--from", dest="begin", default="", help="skip what comes before the step of this name")
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args(words)
    plans, until = read_plans(given.plan), time.monotonic() + given.seconds
    known = [step["name"] for rows in plans for step in rows["steps"]]
    if given.begin and given.begin not in known:
        where = ", ".join(map(str, given.plan))
        parser.error(f"--from {given.begin}: no step of {where} has this name, expected one of {', '.join(known)}")
    given.out.mkdir(parents=True, exist_ok=True)
    for rows in plans:
        names = [step["name"] for step in rows["steps"]]
        rows["steps"] = rows["steps"][names.index(given.begin) if given.begin in names else 0 :]
    lanes = [Lane(number, rows, given.out, until) for number, rows in enumerate(plans)]
    if not any(each.name == "llmperf" for each in entry_points(group="pytest11")):
        parser.error("pytest would not load this plugin here: no entry point llmperf is installed; pip install -e .")
    if given.rehearse:
        return rehearsed(lanes, plans)
    # In the background of a shell Ctrl-C is ignored, which a command would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threads = [threading.Thread(target=lane.run) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = [row for lane in lanes for row in lane.done]
    (given.out / "visit.json").write_text(json.dumps(done, indent=1), encoding="utf-8")
    packed(given.out, lanes)
    return int(any(row["code"] is None or row["code"] == _NOT_STARTED or row["code"] < 0 for row in done))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
