"""The jobs of a night: what they may cost, their scripts, what sbatch answers, and where each night stands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_llmperf.cli.answer import ClusterError
from pytest_llmperf.cli.cluster_file import KEYS, SBATCH, ClusterFile
from pytest_llmperf.report.text import one_line
from pytest_llmperf.support import grouped
from pytest_llmperf.support.files import text_of


@dataclass(frozen=True, kw_only=True)
class Job:
    """One sbatch: the widths it runs, or the tasks of its array."""

    widths: tuple[int, ...]
    nodes: int
    is_array: bool
    gpu_hours: float
    """At most, in one start of all its tasks: every GPU of every node until the time limit; 0: no GPU."""

    @property
    def title(self) -> str:
        widths = " ".join(map(str, self.widths))
        how = "each a task of an array" if self.is_array else "one after the other"
        cost = f": at most {self.gpu_hours:.1f} GPU-hours a start" if self.gpu_hours else ""
        return f"{widths} GPU(s) on {self.nodes} node(s), {how}{cost}"


def jobs(cluster: ClusterFile) -> list[Job]:
    """What one night submits, the widest first."""
    per_node, widths, is_array = cluster.value("cluster", "gpus_per_node"), cluster.widths, cluster.is_array
    nodes = {width: -(-width // per_node) for width in widths}
    # All tasks of an array have the same number of nodes, and the same options.
    options = ((nodes[width], str(cluster.at(width).values["sbatch"])) if is_array else (0, "") for width in widths)
    found = []
    for same in grouped(zip(options, widths, strict=True)).values():
        of_first = cluster.at(same[0]) if is_array else cluster
        each = 0.0 if cluster.on_cpu else per_node * of_first.value("sbatch", "time")
        hours = (len(same) if is_array else 1) * nodes[same[0]] * each
        found.append(Job(widths=tuple(same), nodes=nodes[same[0]], is_array=is_array, gpu_hours=hours))
    return found


def check_budget(cluster: ClusterFile, planned: Sequence[Job]) -> None:
    """Refuse, by a ClusterError, what may cost more than the file allows."""
    total, budget = sum(job.gpu_hours for job in planned), cluster.value("suite", "budget_gpu_hours")
    if budget is not None and total > budget:
        raise ClusterError(
            f"{cluster.path}: not submitted, a start may cost {total:.1f} GPU-hours, budget_gpu_hours = {budget:g}; "
            "lower [sbatch] time or [suite] gpus, or raise the budget"
        )


def cost(cluster: ClusterFile, planned: Sequence[Job]) -> str:
    """What the night may cost, as far as anything bounds it."""
    if cluster.on_cpu:
        return "no GPU-hours, on_cpu = yes"
    total = sum(job.gpu_hours for job in planned)
    restarts = cluster.value("suite", "max_restarts")
    again = f" a start, {total * (1 + restarts):.1f} in all starts (max_restarts = {restarts})" if restarts else ""
    return f"at most {total:.1f} GPU-hours{again}"


# The controller may have taken a job and not come to say so.
_UNSURE = re.compile(r"timed out|Unable to contact|Zero Bytes", re.IGNORECASE)
# And the cluster's name, where there are several; a site's own words may stand before it.
_NUMBER = re.compile(r"^([0-9]+)(?:;.*)?$", re.MULTILINE)
_REFUSED = "sbatch refused: "
_USAGE = 'Try "sbatch --help" for more information'
# SLURM says so of options that no node has, and of any job while its nodes are down or drained.
_NOT_NOW = re.compile("configuration is not available|nodes are busy|not available")


class RefusedError(ClusterError):
    """sbatch took no job."""


def answer_of(
    command: Sequence[str], seconds: float | None = None, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """``command`` at its end, as ``subprocess.run``; not by pipes: what it started may hold them open longer."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        done = subprocess.run(
            command, check=False, cwd=folder, timeout=seconds, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode("utf-8", "replace"))
    return subprocess.CompletedProcess(command, done.returncode, *said)


def check_taken(cluster: ClusterFile, words: Sequence[str]) -> None:
    """ClusterError: sbatch would not take a job."""
    try:
        sbatch(["--test-only", *words])
    except RefusedError as error:
        if not _NOT_NOW.search(str(error).removeprefix(_REFUSED)):
            raise refused(cluster, str(error)) from None


def refused(cluster: ClusterFile, said: str) -> RefusedError:
    said = said.removeprefix(_REFUSED).replace("sbatch: error: ", "").removesuffix(_USAGE).strip()
    return RefusedError(f"{cluster.path}: {_REFUSED}{said}")


def sbatch(words: Sequence[str]) -> str:
    """Submit; the job's number. RefusedError: sbatch is missing or refuses; ClusterError: it is not known to have."""
    if elsewhere := os.environ.get("SLURM_CLUSTERS"):
        raise RefusedError(f"SLURM_CLUSTERS={elsewhere}: a cluster {SBATCH['--clusters']}")
    try:
        done = answer_of(["sbatch", "--parsable", *words])
    except OSError as error:
        raise RefusedError(
            f"sbatch: {error}; submit where SLURM is; one machine without it needs pytest --gpus N alone"
        ) from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        if _UNSURE.search(said):
            raise ClusterError(f"sbatch: {said}; see squeue whether it took the job")
        raise RefusedError(f"{_REFUSED}{said}")
    if "--test-only" in words:
        return ""
    if not (numbers := _NUMBER.findall(done.stdout)):
        said = " ".join((done.stdout + done.stderr).split()) or "nothing"
        raise ClusterError(f"sbatch said {said}, expected the number of a job; see squeue whether it took one")
    return str(numbers[-1])


def merge_options(cluster: ClusterFile, job_ids: Sequence[str]) -> list[str]:
    """sbatch's options for the job that merges what the others leave, however they end."""
    known = {key: cluster.text("sbatch", key) for key in ("account", "partition", "qos")}
    known |= {"mail-user": address, "mail-type": "END,FAIL"} if (address := cluster.text("suite", "mail")) else {}
    return [
        *([f"--dependency=afterany:{':'.join(job_ids)}"] if job_ids else []),
        *("--nodes=1", "--ntasks=1", "--time=00:10:00", f"--job-name={cluster.text('cluster', 'name')}-merge"),
        # The script writes its own log: with one that cannot be opened SLURM would not start it.
        f"--output={os.devnull}",
        *(f"--{key}={value}" for key, value in known.items() if value),
        *cluster.words("sbatch", "merge_options"),
    ]


def merge_arguments(cluster: ClusterFile, results: Path, planned: Sequence[Job]) -> list[str]:
    return [
        *(str(results), *(f"--expect=gpus-{width}.json" for job in planned for width in job.widths)),
        *("--json", str(results / "merged.json"), "--markdown", str(results / "summary.md")),
        *(f"--without={word}" for word in cluster.text("suite", "without").replace(",", " ").split()),
    ]


_PLACEHOLDER = re.compile(r"@([a-z_]+)@")
_PLAIN = re.compile(r"[\w@%+=:,./-]+")
_SIGNAL_SECONDS = 60


def filled(template: str, cluster: ClusterFile, job: Job, results: Path) -> str:
    """The nightly script of ``job``, without lines of sbatch that have no value. ClusterError: unknown placeholders."""
    cluster = cluster.at(job.widths[0])
    values = _values(cluster, job, results)
    lines = []
    for line in template.splitlines():
        names = _PLACEHOLDER.findall(line)
        if unknown := [name for name in names if name not in values]:
            raise ClusterError(f"the script asks for @{unknown[0]}@, which is unknown; known: {', '.join(values)}")
        if not line.startswith("#SBATCH"):
            lines.append(_quoted(line, values))
        elif "exclusive" in names:
            lines += [line.replace("=@exclusive@", "")] if values["exclusive"] == "yes" else []
        elif all(values[name] for name in names):
            lines.append(_PLACEHOLDER.sub(lambda match: _sbatch_quoted(values[match[1]]), line))
    last = max((number for number, line in enumerate(lines) if line.startswith("#SBATCH")), default=-1)
    # On one line, since only there an option and the word after it belong together.
    extra = " ".join(map(_sbatch_quoted, cluster.words("sbatch", "options")))
    return "\n".join([*lines[: last + 1], *([f"#SBATCH {extra}"] if extra else []), *lines[last + 1 :], ""])


def filled_merge(template: str, cluster: ClusterFile, results: Path, arguments: Sequence[str]) -> str:
    """The script that merges, with ``arguments`` for `llmperf merge`."""
    values = {
        "checkout": str(cluster.checkout),
        "results": str(results),
        "host_python": cluster.text("suite", "python"),
        "options": shlex.join(arguments),
    }
    return _quoted(template, values)


def signal_seconds(hours: float) -> int:
    """How long before its end a job is told to stop: SLURM may be half a minute early, when no launch is in the way."""
    return max(1, min(_SIGNAL_SECONDS, int(hours * 3600 / 8)))


def pytest_options(cluster: ClusterFile) -> list[str]:
    """What every pytest of a night is given: the suite's own options, and what the site says once."""
    said = {key: cluster.text("launch", key) for key in KEYS["launch"]}
    launch = [word for key, value in said.items() if value for word in ("-o", f"perf_slurm_{key}={value}")]
    return [*cluster.words("suite", "options"), *launch]


def _values(cluster: ClusterFile, job: Job, results: Path) -> Mapping[str, str]:
    per_node, cores = (cluster.value("cluster", key) for key in ("gpus_per_node", "cpus_per_node"))
    on_cpu = cluster.on_cpu
    gpus = min(per_node, max(job.widths))
    # A node's cores shared among its tasks; on the CPU a task is a rank.
    cpus = "1" if on_cpu else ""
    if cores:
        cpus = str(max(1, cores // (gpus if on_cpu else 1)))
    log = "%x-%A_%a.log" if job.is_array else "%x-%j.log"
    sbatch_values = {key: cluster.text("sbatch", key) for key in KEYS["sbatch"] if "options" not in key}
    return {
        **sbatch_values,
        "gres": sbatch_values["gres"] or ("" if on_cpu else f"gpu:{gpus}"),
        "nodes": str(job.nodes),
        "tasks_per_node": str(gpus) if on_cpu else "1",
        "cpus_per_task": cpus,
        "signal_seconds": str(signal_seconds(cluster.value("sbatch", "time"))),
        "array": ",".join(map(str, job.widths)) if job.is_array else "",
        "name": cluster.text("cluster", "name"),
        "output": f"{str(results).replace('%', '%%')}/{log}",  # a % of the folder's own name is none of SLURM's
        "checkout": str(cluster.checkout),
        "results": str(results),
        "host_python": cluster.text("suite", "python"),
        "widths": " ".join(map(str, job.widths)),
        "per_node": str(per_node),
        "on_cpu": "yes" if on_cpu else "no",
        "select": cluster.text("suite", "select"),
        "scratch": cluster.text("launch", "scratch"),
        "max_restarts": cluster.text("suite", "max_restarts"),
        "options": shlex.join(pytest_options(cluster)),
    }


def _sbatch_quoted(value: str) -> str:
    # Not as a shell: sbatch takes a backslash for an escape inside of any quotes, and # for a comment outside of them.
    return value if _PLAIN.fullmatch(value) else '"' + re.sub(r'([\\"])', r"\\\1", value) + '"'


def _quoted(text: str, values: Mapping[str, str]) -> str:
    """``text`` with each value as one word of a shell; the options are quoted, each by itself."""
    return _PLACEHOLDER.sub(lambda one: values[one[1]] if one[1] == "options" else shlex.quote(values[one[1]]), text)


# Nights, each in a folder of its own: which jobs it has, and how it was merged.
JOBS_FILE, SUMMARY_FILE = "jobs.txt", "summary.md"
_QUEUE_SECONDS = 60
# SLURM looks at a new job within a few seconds, and has no reason before.
_FIRST_LOOK_SECONDS = 5.0
_OPEN = frozenset(
    "PENDING RUNNING SUSPENDED COMPLETING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED RESIZING SIGNALING "
    "SPECIAL_EXIT STAGE_OUT STOPPED RESV_DEL_HOLD".split()
)


def queued(jobs: Sequence[str]) -> Mapping[str, str] | None:
    """Those of ``jobs`` that SLURM knows, an array by its first task that goes on: ``PENDING (Priority)``;
    ``None``: it does not answer, or is not installed here."""
    command = ["squeue", "--noheader", "--states=all", "--format=%F|%T|%r", f"--jobs={','.join(jobs)}"]
    try:
        done = answer_of(command, _QUEUE_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return {} if "Invalid job id" in done.stderr else None
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        number, state, reason = [*line.strip().split("|", 2), "", ""][:3]
        if number in jobs and not _is_open(found.get(number, "")):
            found[number] = f"{state} ({reason})" if state == "PENDING" and reason else state
    return found


def _is_open(state: str) -> bool:
    return state.partition(" ")[0] in _OPEN


def first_look(jobs: Sequence[str]) -> Mapping[str, str]:
    """Just submitted ``jobs``, once SLURM says why they wait, or a few seconds later; empty where nothing is known."""
    deadline = time.monotonic() + _FIRST_LOOK_SECONDS
    while True:
        found = queued(jobs) or {}
        if not {"PENDING", "PENDING (None)"} & {*found.values()} or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


@dataclass(frozen=True)
class Night:
    """One that was submitted, as its folder tells."""

    folder: Path
    began: float
    """When it was submitted, in epoch seconds; 0: it never was."""
    merged: float = 0.0
    """And merged; 0: it is not."""
    said: str = ""
    """The first line of its summary."""
    jobs: tuple[str, ...] = ()
    """By their numbers, the one that merges the last."""

    @classmethod
    def of(cls, folder: Path) -> Night:
        def at(name: str) -> float:
            with suppress(OSError):
                return (folder / name).stat().st_mtime
            return 0.0

        said = one_line(text_of(folder / SUMMARY_FILE).partition("\n")[0].removeprefix("# "))
        merged = at(SUMMARY_FILE) if said else 0.0
        return cls(folder, at("merge.sbatch"), merged, said, tuple(text_of(folder / JOBS_FILE).split()))

    def standing(self) -> tuple[str, bool]:
        """How it was merged, else where SLURM says that its jobs stand; and whether nobody will merge it."""
        if self.merged:
            return self.said, False
        if not self.jobs:
            return f"not merged: no job is known that merges it; see {self.folder}", True
        if (found := queued(self.jobs)) is None:
            return f"not merged yet: jobs {' '.join(self.jobs)}; SLURM does not answer here", False
        *states, merging = (f"{job} {found.get(job, 'ended')}" for job in self.jobs)
        if not _is_open(found.get(self.jobs[-1], "")):
            what = f"not merged: merging job {merging}; jobs: {', '.join(states)}"
            return f"{what}; see {self.folder}, or: llmperf merge {self.folder}", True
        hours = (time.time() - self.began) / 3600
        return f"not merged yet: {', '.join(states)}" + (f" for {hours:.0f} h" if hours >= 1 else ""), False


def nights(results: Path) -> list[Night]:
    """Those that were submitted with their folders in ``results``, in the order in which they began; OSError."""
    found = (Night.of(folder) for folder in results.iterdir())
    return sorted((night for night in found if night.began), key=lambda night: night.began)
