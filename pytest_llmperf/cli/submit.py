"""`llmperf submit`: the nightly script, filled from a cluster file, given to sbatch; its cost known before."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_llmperf.cli.clusterfile import KEYS, ClusterError, ClusterFile

_PLACEHOLDER = re.compile(r"@([a-z_]+)@")
_LAUNCH_INI = {key: f"perf_slurm_{key}" for key in KEYS["launch"]}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One sbatch: the widths it runs, or the tasks of its array."""

    widths: tuple[int, ...]
    nodes: int
    is_array: bool
    gpu_hours: float
    """At most, of all its tasks: every GPU of every node until the time limit."""

    @property
    def title(self) -> str:
        widths = " ".join(map(str, self.widths))
        how = "each a task of an array" if self.is_array else "one after the other"
        return f"{widths} GPU(s) on {self.nodes} node(s), {how}: at most {self.gpu_hours:.1f} GPU-hours"


def jobs(cluster: ClusterFile) -> list[Job]:
    """What one night submits, the widest first."""
    per_node = cluster.count("cluster", "gpus_per_node")
    each = per_node * cluster.hours if cluster.text("cluster", "on_cpu") == "no" else 0.0
    widths = cluster.widths
    if cluster.text("suite", "mode") == "packed" or cluster.text("cluster", "scheduler") == "local":
        nodes = _nodes(widths[0], per_node)
        return [Job(widths=tuple(widths), nodes=nodes, is_array=False, gpu_hours=nodes * each)]
    # All tasks of an array have the same number of nodes.
    by_nodes: dict[int, list[int]] = {}
    for width in widths:
        by_nodes.setdefault(_nodes(width, per_node), []).append(width)
    return [
        Job(widths=tuple(same), nodes=nodes, is_array=True, gpu_hours=len(same) * nodes * each)
        for nodes, same in by_nodes.items()
    ]


def check_budget(cluster: ClusterFile, planned: Sequence[Job]) -> None:
    """Refuse what may cost more than the file allows.

    Raises:
        ClusterError: it may.
    """
    total, budget = sum(job.gpu_hours for job in planned), cluster.budget
    if budget is not None and total > budget:
        raise ClusterError(
            f"{cluster.path}: not submitted, it may cost {total:.1f} GPU-hours, budget_gpu_hours = {budget:g}; "
            "lower [sbatch] time or [suite] gpus, or raise the budget"
        )


def shares(cluster: ClusterFile, planned: Sequence[Job]) -> list[float | None]:
    """GPU-hours that a task of each job may spend in all its starts together; ``None``: whatever it takes."""
    total, budget = sum(job.gpu_hours for job in planned), cluster.budget
    if budget is None or not total:
        return [None for _ in planned]
    # Alike within an array, not by width: its narrow tasks hold as many nodes and GPUs as its wide ones.
    return [budget * job.gpu_hours / total / (len(job.widths) if job.is_array else 1) for job in planned]


def script(template: str, cluster: ClusterFile, job: Job, results: Path, budget_share: float | None) -> str:
    """The nightly script of ``job``: a line of sbatch whose placeholder has no value is left out.

    Raises:
        ClusterError: the template asks for something that no cluster file says.
    """
    values = _values(cluster, job, results, budget_share)
    lines = []
    for line in template.splitlines():
        names = _PLACEHOLDER.findall(line)
        unknown = [name for name in names if name not in values]
        if unknown:
            raise ClusterError(f"the script asks for @{unknown[0]}@, which is unknown; known: {', '.join(values)}")
        if line.startswith("#SBATCH") and names:
            lines += _option(line, names[0], values[names[0]])
        else:
            lines.append(_PLACEHOLDER.sub(lambda match: _quoted(match[1], values[match[1]]), line))
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    extra = [f"#SBATCH {option}" for option in cluster.words("sbatch", "options")]
    return "\n".join([*lines[: last + 1], *extra, *lines[last + 1 :], ""])


def results_folder(cluster: ClusterFile) -> Path:
    """A new folder for this submission: two of one second do not meet in it."""
    home = _path(cluster, "checkout") / cluster.text("suite", "results")
    return home / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def run_here(path: Path) -> int:
    """The script's exit code, run on this machine."""
    return subprocess.run(["bash", str(path)], check=False, stdin=subprocess.DEVNULL).returncode


def sbatch(words: Sequence[str]) -> str:
    """Submit; the job's number.

    Raises:
        ClusterError: sbatch is missing or refuses.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *words], check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise ClusterError(
            f"sbatch: {error}; submit where SLURM is, or write scheduler = local to run on this machine"
        ) from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ClusterError(f"sbatch refused: {said}")
    return done.stdout.strip().partition(";")[0]


def merge_words(cluster: ClusterFile, job_ids: Sequence[str], results: Path, planned: Sequence[Job]) -> list[str]:
    """sbatch's arguments for the job that merges what the others leave, however they end."""
    known = [
        f"--{key}={cluster.text('sbatch', key)}"
        for key in ("account", "partition", "qos")
        if cluster.text("sbatch", key)
    ]
    return [
        *(f"--dependency=afterany:{':'.join(job_ids)}", "--nodes=1", "--ntasks=1", "--time=00:10:00"),
        *(f"--job-name={cluster.text('cluster', 'name')}-merge", f"--output={results}/merge.log", *known),
        *cluster.words("sbatch", "merge_options"),
        f"--wrap={merge_line(cluster, results, planned)}",
    ]


def merge_line(cluster: ClusterFile, results: Path, planned: Sequence[Job]) -> str:
    """The shell's line that merges, and mails the summary where an address is given."""
    expected = [f"--expect=gpus-{width}.json" for job in planned for width in job.widths]
    merge = [cluster.text("suite", "python"), "-m", "pytest_llmperf.cli", "merge", str(results), *expected]
    merge += ["--json", str(results / "merged.json"), "--markdown", str(results / "summary.md")]
    line = f"cd {shlex.quote(str(_path(cluster, 'checkout')))} && {shlex.join(merge)}"
    address = cluster.text("suite", "mail")
    if not address:
        return line
    subject = f"{cluster.text('cluster', 'name')}: $([ $code -eq 0 ] && echo green || echo RED)"
    mail = f'mail -s "{subject}" {shlex.quote(address)} < {shlex.quote(str(results / "summary.md"))}'
    return f"{line}; code=$?; {mail}; exit $code"


def _values(cluster: ClusterFile, job: Job, results: Path, budget_share: float | None) -> Mapping[str, str]:
    per_node = cluster.count("cluster", "gpus_per_node")
    on_cpu = cluster.text("cluster", "on_cpu") == "yes"
    gpus = min(per_node, max(job.widths))
    options = cluster.words("suite", "options")
    for key, ini in _LAUNCH_INI.items():
        if cluster.text("launch", key):
            options += ["-o", f"{ini}={cluster.text('launch', key)}"]
    if budget_share is not None and not on_cpu and cluster.text("cluster", "scheduler") == "slurm":
        options += ["--perf-budget", f"{budget_share:g}"]
    sbatch_values = {key: cluster.text("sbatch", key) for key in KEYS["sbatch"] if "options" not in key}
    return {
        **sbatch_values,
        "gres": sbatch_values["gres"] or ("" if on_cpu else f"gpu:{gpus}"),
        "nodes": str(job.nodes),
        "tasks_per_node": str(gpus) if on_cpu else "1",
        "cpus_per_task": "1" if on_cpu else cluster.text("cluster", "cpus_per_node"),
        "array": ",".join(map(str, job.widths)) if job.is_array else "",
        "name": cluster.text("cluster", "name"),
        "output": str(results / ("%x-%A_%a.log" if job.is_array else "%x-%j.log")),
        "checkout": str(_path(cluster, "checkout")),
        "results": str(results),
        "host_python": cluster.text("suite", "python"),
        "widths": " ".join(map(str, job.widths)),
        "per_node": str(per_node),
        "on_cpu": "yes" if on_cpu else "no",
        "select": cluster.text("suite", "select"),
        "max_restarts": cluster.text("suite", "max_restarts"),
        "options": shlex.join(options),
    }


def _option(line: str, name: str, value: str) -> list[str]:
    if value in {"", "no"}:
        return []
    return [line.replace(f"=@{name}@", "")] if value == "yes" else [line.replace(f"@{name}@", value)]


def _quoted(name: str, value: str) -> str:
    # All but the options stand inside "${NAME:-…}".
    return value if name == "options" else re.sub(r'([\\"$`}])', r"\\\1", value)


def _path(cluster: ClusterFile, key: str) -> Path:
    return Path(cluster.text("suite", key)).expanduser().absolute()


def _nodes(width: int, per_node: int) -> int:
    return -(-width // per_node)
