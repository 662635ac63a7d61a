"""A real SLURM on this host: one controller, three nodes, started for the tests and ended by pid."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

PACKAGES = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge"
NODES = ("n1", "n2", "n3")

_CONFIGURATION = """\
ClusterName=llmperf
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}/socket
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool.%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdTimeout=10
KillWait=30
MessageTimeout=5
MinJobAge=3600
ReturnToService=2
MpiDefault=none
JobRequeue=1
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=2000"


def missing() -> str:
    """Why no SLURM can be started here, naming what to install; empty where one can."""
    if os.geteuid() != 0:
        return "a SLURM of one's own needs root"
    programs = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
    absent = [name for name in programs if _program(name) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install --no-install-recommends {PACKAGES}"
    return ""


@dataclass(frozen=True)
class Slurm:
    """The running cluster."""

    home: Path

    def sbatch(self, *words: str) -> str:
        return self.command("sbatch", "--parsable", *words).strip()

    def command(self, *words: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=self.environment, timeout=60)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        """For everything that talks to it; gloo would look up this host's name, which need not resolve."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PYTEST_"))}
        own = {"SLURM_CONF": str(self.home / "slurm.conf"), "LLMPERF_LEASE_DIR": str(self.home / "leases")}
        return {**clean, **own, "GLOO_SOCKET_IFNAME": "lo"}

    def job(self, job: str) -> dict[str, str]:
        """Its fields, as scontrol shows them."""
        return dict(re.findall(r"(\w[\w:/]*)=(\S*)", self.command("scontrol", "show", "job", "-o", job)))

    def state(self, job: str) -> str:
        return self.job(job)["JobState"]

    def ended(self, job: str, seconds: float = 240.0) -> dict[str, str]:
        """Its fields once it has ended."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"}
        self.wait(lambda: self.nudged(job) in over, seconds, lambda: f"job {job} does not end: {self.job(job)}")
        return self.job(job)

    def nudged(self, job: str) -> str:
        """Its state; one that waits is scheduled now, and not when SLURM finds the time, minutes after a requeue.

        A job of which a slurmd could not launch a step is requeued and held (``launch_failed_requeued_held``), as on a
        loaded host whose controller comes back. It is released here, as whoever submitted it would.
        """
        fields = self.job(job)
        if fields["JobState"] == "PENDING":
            with suppress(AssertionError):
                if "held" in fields["Reason"].lower():
                    self.command("scontrol", "release", job)
                self.command("scontrol", "update", f"JobId={job}", "StartTime=now")
        return fields["JobState"]

    def wait(self, seen: Callable[[], object], seconds: float, otherwise: Callable[[], str]) -> None:
        deadline = time.monotonic() + seconds
        while True:
            with suppress(AssertionError, subprocess.TimeoutExpired):  # a busy controller may not answer at once
                if seen():
                    return
            assert time.monotonic() < deadline, otherwise()
            time.sleep(0.6)  # each look is a process, and work for the controller

    def processes(self, **variables: str) -> list[psutil.Process]:
        """Those of this cluster and no other one on this host, with these variables too."""
        wanted = {**variables, "SLURM_CONF": self.environment["SLURM_CONF"]}
        return [
            process
            for process in psutil.process_iter()
            if process.pid != os.getpid() and all(_variable(process, name) == wanted[name] for name in wanted)
        ]

    def end_all_jobs(self) -> None:
        """Cancel what runs or waits, as a test that failed leaves it."""
        jobs = self.command("squeue", "--noheader", "--format=%A").split()
        if jobs:
            self.command("scancel", *jobs)
            self.wait(lambda: not self.command("squeue", "--noheader"), 150, lambda: f"jobs {jobs} do not end")

    def kill_node(self, node: str) -> None:
        """As if its power went: its slurmd, the steps it runs, and everything in them."""
        self.kill_daemon(node)
        deadline = time.monotonic() + 15
        # Again until nothing is left: what began while the host's processes were looked through is not among them, and
        # a rank that lives trains on with those of the other nodes.
        while inside := self.processes(SLURMD_NODENAME=node):
            assert time.monotonic() < deadline, f"{node} does not die: {inside}"
            steps = {*filter(None, map(_step, inside))}
            for victim in [*steps, *inside]:  # before they can tell of their tasks' end
                with suppress(psutil.Error):
                    victim.kill()
            psutil.wait_procs(inside, timeout=1)

    def kill_daemon(self, node: str) -> None:
        """As if the network lost it: SLURM gives it up, and what runs there goes on."""
        daemon = _slurmd(self.home, node)
        if daemon is not None:
            daemon.kill()

    def kill_controller(self) -> None:
        """As if its host went down: nothing is scheduled, and no step begins; those that run go on."""
        controller = psutil.Process(int((self.home / "slurmctld.pid").read_text()))
        controller.kill()
        psutil.wait_procs([controller], timeout=10)

    def start_controller(self) -> None:
        """Start it where its state is, jobs and all."""
        _run(["slurmctld"], self.environment)
        self.wait(lambda: "UP" in self.command("scontrol", "ping"), 30, lambda: "slurmctld does not come back")

    def give_up_after(self, seconds: int) -> None:
        """How long SLURM waits for a node that does not answer."""
        path = self.home / "slurm.conf"
        path.write_text(re.sub(r"SlurmdTimeout=\d+", f"SlurmdTimeout={seconds}", path.read_text()))
        self.command("scontrol", "reconfigure")

    def give_up(self, node: str) -> None:
        """What an administrator says of a node that is gone, or SLURM itself once its time is over."""
        self.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=gone")

    def start_daemon(self, node: str) -> None:
        """Start its slurmd where there is none."""
        if _slurmd(self.home, node) is None:
            _run(["slurmd", "-N", node], self.environment)

    def start_node(self, node: str) -> None:
        """Start its slurmd and wait until it takes work."""
        self.start_daemon(node)
        if not self.is_idle(node):
            with suppress(AssertionError):  # it may have come back by itself meanwhile
                self.command("scontrol", "update", f"NodeName={node}", "State=RESUME")
        self.wait(lambda: self.is_idle(node), 60, lambda: f"{node} does not become idle")

    def is_idle(self, node: str) -> bool:
        # Not from sinfo, which goes on to call a node mixed when its job has ended.
        return " State=IDLE " in self.command("scontrol", "show", "node", "-o", node)


@contextmanager
def running(home: Path) -> Iterator[Slurm]:
    """Start everything; at the end nothing of it is alive."""
    (home / "state").mkdir()
    for node in NODES:
        (home / f"spool.{node}").mkdir()
    host = socket.gethostname().split(".")[0]
    ports = _free_ports(2 + len(NODES))
    nodes = "\n".join(
        _NODE.format(name=name, host=host, port=port) for name, port in zip(NODES, ports[2:], strict=True)
    )
    slurm = Slurm(home)
    with _munged() as munge:
        text = _CONFIGURATION.format(home=home, host=host, ports=ports, nodes=nodes, munge=munge)
        (home / "slurm.conf").write_text(text)
        try:
            _run(["slurmctld", "-c"], slurm.environment)
            for node in NODES:
                _run(["slurmd", "-N", node], slurm.environment)
            for node in NODES:
                slurm.wait(partial(slurm.is_idle, node), 60, lambda: f"SLURM does not start, see {home}/*.log")
            yield slurm
        finally:
            _end(slurm)


def _end(slurm: Slurm) -> None:
    for words in (["scancel", "--user=root"], ["scontrol", "shutdown"]):
        subprocess.run(words, env=slurm.environment, check=False, capture_output=True, timeout=60)
    daemons = [found for name in NODES if (found := _slurmd(slurm.home, name))]
    with suppress(OSError, ValueError, psutil.Error):
        daemons.append(psutil.Process(int((slurm.home / "slurmctld.pid").read_text())))
    _, alive = psutil.wait_procs(daemons, timeout=15)
    for daemon in alive:
        daemon.kill()
    deadline = time.monotonic() + 15
    while (left := slurm.processes()) and time.monotonic() < deadline:  # what was killed may have begun more meanwhile
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1)


@contextmanager
def _munged() -> Iterator[Path]:
    """A munged of this cluster's own; yields the folder of its socket, which everybody must be able to enter."""
    with tempfile.TemporaryDirectory(prefix="llmperf-munge-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "key").write_bytes(secrets.token_bytes(1024))
        (folder / "key").chmod(0o600)
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        # Once the command has returned, it answers.
        _run(["munged", *(f"--{option}={folder / file}" for option, file in files.items())], dict(os.environ))
        munged = psutil.Process(int((folder / "pid").read_text()))
        try:
            yield folder
        finally:
            munged.terminate()
            psutil.wait_procs([munged], timeout=10)


def _slurmd(home: Path, node: str) -> psutil.Process | None:
    with suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int((home / f"slurmd.{node}.pid").read_text()))
        if process.name() == "slurmd" and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def _step(task: psutil.Process) -> psutil.Process | None:
    """The step that started it, where that still lives."""
    with suppress(psutil.Error):
        parent = task.parent()
        return parent if parent is not None and "slurmstepd" in parent.name() else None
    return None


def _variable(process: psutil.Process, name: str) -> str | None:
    # Not by psutil, which reads to the first gap: a slurmstepd has written its title over what comes before.
    try:
        words = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    values = (word.partition(b"=")[2] for word in words if word.startswith(f"{name}=".encode()))
    return next((value.decode(errors="replace") for value in values), None)


def _run(words: list[str], environment: dict[str, str]) -> None:
    program = _program(words[0])
    assert program is not None
    with Path(os.devnull).open("w") as nothing:  # a daemon keeps what it inherits, and a pipe would never end
        subprocess.run(
            [program, *words[1:]],
            env=environment,
            check=True,
            timeout=60,
            stdout=nothing,
            stderr=nothing,
            stdin=nothing,
        )


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def _free_ports(count: int) -> list[int]:
    """Below those that Linux hands out by itself: a node that is started anew needs its port again."""
    found: list[int] = []
    while len(found) < count:
        port = 10_000 + secrets.randbelow(10_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found += [] if port in found else [port]
    return found


__all__ = ["NODES", "Slurm", "missing", "running"]
