"""The scripts of a night, filled from a cluster file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_llmperf.cli.command_error import ClusterError
from pytest_llmperf.cli.submit.cluster_file import KEYS, ClusterFile
from pytest_llmperf.cli.submit.sbatch import nights_file
from pytest_llmperf.cli.submit.sbatch_jobs import Job

_PLACEHOLDER = re.compile(r"@([a-z_]+)@")
_PLAIN = re.compile(r"[\w@%+=:,./-]+")
_SIGNAL_SECONDS = 60
_LAUNCH_INI = {key: f"perf_slurm_{key}" for key in KEYS["launch"]}


def filled(template: str, cluster: ClusterFile, job: Job, results: Path, budget_share: float | None) -> str:
    """The nightly script of ``job``: a line of sbatch whose placeholder has no value is left out.

    Raises:
        ClusterError: the template asks for something that no cluster file says.
    """
    cluster = cluster.at(job.widths[0])
    values = _values(cluster, job, results, budget_share)
    lines = []
    for line in template.splitlines():
        names = _PLACEHOLDER.findall(line)
        unknown = [name for name in names if name not in values]
        if unknown:
            raise ClusterError(f"the script asks for @{unknown[0]}@, which is unknown; known: {', '.join(values)}")
        if line.startswith("#SBATCH"):
            lines += _directive(line, {name: values[name] for name in names})
        else:
            lines.append(_PLACEHOLDER.sub(lambda match: _quoted(match[1], values[match[1]]), line))
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
        "name": cluster.text("cluster", "name"),
        "mail": cluster.text("suite", "mail"),
        "nights": str(nights_file(cluster)),
        "log": "" if cluster.is_local else str(results / "merge.log"),
        "options": shlex.join(arguments),
    }
    return _PLACEHOLDER.sub(lambda match: _quoted(match[1], values[match[1]]), template)


def signal_seconds(hours: float) -> int:
    """How long before its end a job is told to stop: a minute, or an eighth of a short job.

    SLURM tells it up to half a minute earlier, and by then pytest has seen to it that no launch is in the way.
    """
    return max(1, min(_SIGNAL_SECONDS, int(hours * 3600 / 8)))


def log_name(results: Path, pattern: str) -> str:
    """A log's name as sbatch takes it: a % of the folder's own name is none of SLURM's."""
    return f"{str(results).replace('%', '%%')}/{pattern}"


def pytest_options(cluster: ClusterFile) -> list[str]:
    """What every pytest of a night is given: the suite's own options, and what the site says once."""
    said = {ini: cluster.text("launch", key) for key, ini in _LAUNCH_INI.items()}
    launch = [word for ini, value in said.items() if value for word in ("-o", f"{ini}={value}")]
    return [*cluster.words("suite", "options"), *launch]


def _values(cluster: ClusterFile, job: Job, results: Path, budget_share: float | None) -> Mapping[str, str]:
    per_node = cluster.count("cluster", "gpus_per_node")
    on_cpu = cluster.text("cluster", "on_cpu") == "yes"
    gpus = min(per_node, max(job.widths))
    sbatch_values = {key: cluster.text("sbatch", key) for key in KEYS["sbatch"] if "options" not in key}
    return {
        **sbatch_values,
        "gres": sbatch_values["gres"] or ("" if on_cpu else f"gpu:{gpus}"),
        "nodes": str(job.nodes),
        "tasks_per_node": str(gpus) if on_cpu else "1",
        "cpus_per_task": _cpus_per_task(cluster, gpus if on_cpu else 1),
        "signal_seconds": str(signal_seconds(cluster.hours)),
        "array": ",".join(map(str, job.widths)) if job.is_array else "",
        "name": cluster.text("cluster", "name"),
        "output": log_name(results, "%x-%A_%a.log" if job.is_array else "%x-%j.log"),
        "checkout": str(cluster.checkout),
        "results": str(results),
        "host_python": cluster.text("suite", "python"),
        "widths": " ".join(map(str, job.widths)),
        "per_node": str(per_node),
        "on_cpu": "yes" if on_cpu else "no",
        "select": cluster.text("suite", "select"),
        "scratch": cluster.text("launch", "scratch"),
        "max_restarts": cluster.text("suite", "max_restarts"),
        "budget": "" if budget_share is None else f"{budget_share:g}",
        "options": shlex.join(pytest_options(cluster)),
    }


def _cpus_per_task(cluster: ClusterFile, tasks: int) -> str:
    """A node's cores shared among its tasks; on the CPU, where a task is a rank, 1 unless the file says more."""
    if cluster.text("cluster", "cpus_per_node"):
        return str(max(1, cluster.count("cluster", "cpus_per_node") // tasks))
    return "1" if cluster.text("cluster", "on_cpu") == "yes" else ""


def _directive(line: str, values: Mapping[str, str]) -> list[str]:
    """A line for sbatch; none where it has no value to say."""
    if "exclusive" in values:
        return [line.replace("=@exclusive@", "")] if values["exclusive"] == "yes" else []
    if values and not all(values.values()):
        return []
    return [_PLACEHOLDER.sub(lambda match: _sbatch_quoted(values[match[1]]), line)]


def _sbatch_quoted(value: str) -> str:
    # Not as a shell: sbatch takes a backslash for an escape inside of any quotes, and # for a comment outside of them.
    return value if _PLAIN.fullmatch(value) else '"' + re.sub(r'([\\"])', r"\\\1", value) + '"'


def _quoted(name: str, value: str) -> str:
    return value if name == "options" else shlex.quote(value)  # the options are quoted, each by itself
