"""srun, scontrol and the nodes' Python as scripts: what SLURM would do, told by a plan in one file.

The node's agent is the real one; torchrun is played by ``python``, which writes what the plan says.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec
from tests.fakes import launch_of
from tests.slurm.agents import ASK

REPOSITORY = Path(__file__).parents[2]

_SRUN = """
words, plan = sys.argv[1:], json.loads(pathlib.Path(PLAN).read_text())
options = [word for word in words if word.startswith("--")]
command = words[len([*itertools.takewhile(lambda word: word.startswith("--"), words)]):]
said = dict(option[2:].partition("=")[::2] for option in options)
with pathlib.Path(CALLS).open("a") as calls:
    calls.write(json.dumps(words) + "\\n")
if plan.get("srun_error"):
    sys.exit("srun: error: " + plan["srun_error"])
if plan.get("step_refused") and said["job-name"] != "llmperf-facts":
    if plan.get("refused_once"):
        pathlib.Path(PLAN).write_text(json.dumps({**plan, "step_refused": ""}))
    sys.exit("srun: error: Unable to create step for job 7: " + plan["step_refused"])
nodes = said.get("nodelist", "").split(",") if said.get("nodelist") else list(plan["nodes"])
running = []
for node in nodes:
    if plan["nodes"][node].get("dead"):
        print(f"srun: error: Task launch failed on node {node}: Communication failure", file=sys.stderr)
        continue
    topology = f"spine.{plan['nodes'][node].get('switch', 'leaf')}.{node}"
    environment = {**os.environ, "SLURMD_NODENAME": node, "SLURM_TOPOLOGY_ADDR": topology}
    running.append(subprocess.Popen(command, env=environment))
signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in running])
codes = [process.wait() for process in running]
if plan.get("then") and "pytest_llmperf.worker" in words:
    pathlib.Path(PLAN).write_text(json.dumps({**plan, **plan["then"], "then": None}))
sys.exit(max([abs(code) for code in codes], default=1) or int(len(running) < len(nodes)))
"""

_SCONTROL = """
plan = json.loads(pathlib.Path(PLAN).read_text())
if plan.get("silent_answers"):
    pathlib.Path(PLAN).write_text(json.dumps({**plan, "silent_answers": plan["silent_answers"] - 1}))
    sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
if "job" in sys.argv:
    end = time.time() + plan.get("seconds_left", 3600)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(end))
    print("JobId=8 ArrayJobId=7 Restarts=9 EndTime=2000-01-01T00:00:00")
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime())
    print(f"JobId=7 Restarts={plan.get('restarts', 0)} StartTime={start} EndTime={stamp} TimeLimit=1")
else:
    for name in sys.argv[-1].split(","):
        node = plan["nodes"][name]
        state = node.get("state", "DOWN*" if node.get("dead") else "IDLE")
        print(f"NodeName={name} NodeAddr=127.0.0.1 State={state} Gres={node.get('gres', '(null)')}")
"""

_PYTHON = (
    """
plan = json.loads(pathlib.Path(PLAN).read_text())
name = os.environ["SLURMD_NODENAME"]
node = plan["nodes"].get(name, {})
module = sys.argv[2]
if module.endswith("slurm.cluster"):
    gpu = {"name": node.get("gpu", "H100"), "memory_bytes": node.get("gib", 64) * 2**30}
    gpus = [{"index": i, "uuid": f"GPU-{i}", **gpu} for i in range(node.get("gpus", 0))]
    cpu = {"cpu_name": node.get("cpu", "EPYC"), "cores": node.get("cores", 64)}
    facts = {"node": name, "host": name, "gpus": gpus, **cpu}
    facts |= {"granted_gpus": node.get("granted", len(gpus)), "switch": node.get("switch", "")}
    print("Welcome to the cluster\\nllmperf-node " + json.dumps(facts))
elif sys.argv[3:4] == ["server"]:
    os.write(2, b"no fork servers here\\n")  # at once: other nodes write there too
    sys.exit(1)
elif sys.argv[3:4] == ["agent"] and not AGENTS:
    os.execv(REAL, [REAL, *sys.argv[1:]])
elif sys.argv[3:4] == ["agent"]:
"""
    + ASK.removeprefix("\n")
    + """else:
    folder = pathlib.Path(sys.argv[-1])
    (folder / f"environment-{name}.json").write_text(json.dumps(dict(os.environ)))
    if "reached" in plan and name == next(iter(plan["nodes"])):
        now, figures = time.time(), dict.fromkeys(("step", "steps", "reserved_bytes", "tokens_per_step", "compiles"), 0)
        beat = {"phase": "finishing", "time": now, **figures, "reached": {word: now for word in plan["reached"]}}
        (folder / "progress.json").write_text(json.dumps(beat))
    if node.get("silent"):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1)
    if node.get("killed"):
        (folder / f"rank-{list(plan['nodes']).index(name)}.pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    if node.get("unwritable"):
        (folder / f"node-{name}.end.json").mkdir()
    if node.get("meets_nobody"):
        sys.exit(1)
    (folder / f"rank-{list(plan['nodes']).index(name)}.pid").write_text(str(os.getpid()))
    if node.get("hangs"):
        time.sleep(600)
    if node.get("fails"):
        failure = {"kind": "error", "message": node["fails"], "tail": ["its last line"], "time": 1.0}
        (folder / "failure-1.json").write_text(json.dumps(failure))
        sys.exit(1)
    if "launch" in plan and not list(folder.glob("launch.json")):
        copy = f"cp '{plan['launch']}' '{folder}/.part-$$' && mv '{folder}/.part-$$' '{folder}/launch.json'"
        late = f"sleep {plan.get('late', 0)}; {copy}"
        subprocess.Popen(["sh", "-c", late])
"""
)

# Every step that was ever begun is still there, as one may be whose srun had to be killed.
_SQUEUE = """
begun = [json.loads(line) for line in pathlib.Path(CALLS).read_text().splitlines()]
for number, words in enumerate(begun):
    print(f"7.{number} " + next(word for word in words if word.startswith("--job-name=")).partition("=")[2])
"""

_SCANCEL = """
with pathlib.Path(CANCELLED).open("a") as cancelled:
    cancelled.write(sys.argv[-1] + "\\n")
"""

_HEAD = """#!{python}
import itertools, json, os, pathlib, signal, subprocess, sys, time
PLAN, CALLS, CANCELLED, REAL, AGENTS = {plan!r}, {calls!r}, {cancelled!r}, {python!r}, {agents!r}
"""


class FakeSlurm:
    """The commands on ``PATH``, and the allocation's variables; ``agents``: where agents are forked, if anywhere."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, agents: str = "") -> None:
        self._home, self._monkeypatch, self._agents = home, monkeypatch, agents
        self._plan: dict[str, Any] = {}
        self.python = home / "bin" / "fake-python"
        (home / "bin").mkdir()
        scripts = {"srun": _SRUN, "scontrol": _SCONTROL, "squeue": _SQUEUE, "scancel": _SCANCEL, "fake-python": _PYTHON}
        for name, body in scripts.items():
            self._script(name, body)
        for name in [name for name in os.environ if name.startswith("SLURM")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PATH", f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("LLMPERF_LEASE_DIR", str(home / "leases"))
        monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))

    def allocate(self, nodes: dict[str, dict[str, Any]], tasks: int = 1, **plan: Any) -> None:
        """A job with these nodes, and what happens in it."""
        self._plan = {"nodes": nodes, **plan}
        self.plan()
        for name, value in {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": ",".join(nodes),
            "SLURM_JOB_CPUS_PER_NODE": f"8(x{len(nodes)})",
            "SLURM_TASKS_PER_NODE": f"{tasks}(x{len(nodes)})",
        }.items():
            self._monkeypatch.setenv(name, value)

    def plan(self, **more: Any) -> None:
        self._plan |= more
        (self._home / "plan.json").write_text(json.dumps(self._plan))

    def yields(self, spec: TrainSpec, late: float = 0.0) -> None:
        """What launches leave from now on."""
        path = self._home / "launch.json"
        path.write_text(json.dumps(codec.plain(launch_of(spec))))
        self.plan(launch=str(path), late=late)

    @property
    def options(self) -> tuple[str, ...]:
        """pytest's, in such a job; no torch is there to be imported."""
        return ("-o", f"perf_slurm_python={self.python}", "-o", "perf_start=cold")

    @property
    def calls(self) -> list[list[str]]:
        """The words of every srun, the first asked the nodes what they are."""
        path = self._home / "calls.txt"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def cancelled(self) -> list[str]:
        """The steps that scancel was given, by the number of their srun: ``7.1`` is the first launch's."""
        path = self._home / "cancelled.txt"
        return path.read_text().splitlines() if path.exists() else []

    def _script(self, name: str, body: str) -> None:
        path = self._home / "bin" / name
        files = {"plan": "plan.json", "calls": "calls.txt", "cancelled": "cancelled.txt"}
        places = {word: str(self._home / file) for word, file in files.items()}
        head = _HEAD.format(python=sys.executable, agents=self._agents, **places)
        path.write_text(head + body)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
