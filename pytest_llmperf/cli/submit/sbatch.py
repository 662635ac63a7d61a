"""`llmperf submit`: the scripts of a night given to sbatch, or run here; the one that merges their results the last."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pytest_llmperf.cli.answer import ClusterError
from pytest_llmperf.cli.nights.night_log import FILE
from pytest_llmperf.cli.submit.cluster_file import KEYS, ClusterFile

# The jobs of a night, as a cluster file says them, and what they may cost.


@dataclass(frozen=True, kw_only=True)
class Job:
    """One sbatch: the widths it runs, or the tasks of its array."""

    widths: tuple[int, ...]
    nodes: int
    is_array: bool
    gpu_hours: float
    """At most, of a start of all its tasks: every GPU of every node until the time limit; 0: no GPU, or no limit."""

    @property
    def title(self) -> str:
        widths = " ".join(map(str, self.widths))
        how = "each a task of an array" if self.is_array else "one after the other"
        cost = f": at most {self.gpu_hours:.1f} GPU-hours a start" if self.gpu_hours else ""
        return f"{widths} GPU(s) on {self.nodes} node(s), {how}{cost}"


def jobs(cluster: ClusterFile) -> list[Job]:
    """What one night submits, the widest first."""
    per_node = cluster.count("cluster", "gpus_per_node")
    is_free = cluster.text("cluster", "on_cpu") == "yes" or cluster.is_local
    each = 0.0 if is_free else per_node * cluster.hours
    widths = cluster.widths
    if cluster.text("suite", "mode") == "packed" or cluster.is_local:
        nodes = _nodes(widths[0], per_node)
        return [Job(widths=tuple(widths), nodes=nodes, is_array=False, gpu_hours=nodes * each)]
    # All tasks of an array have the same number of nodes, and the same options.
    alike: dict[tuple[int, str], list[int]] = {}
    for width in widths:
        alike.setdefault((_nodes(width, per_node), str(cluster.at(width).values["sbatch"])), []).append(width)
    return [
        Job(widths=tuple(same), nodes=nodes, is_array=True, gpu_hours=len(same) * nodes * hours)
        for (nodes, _), same in alike.items()
        for hours in [0.0 if is_free else per_node * cluster.at(same[0]).hours]
    ]


def check_budget(cluster: ClusterFile, planned: Sequence[Job]) -> None:
    """Refuse what may cost more than the file allows.

    Raises:
        ClusterError: it may.
    """
    total, budget = sum(job.gpu_hours for job in planned), cluster.budget
    if budget is not None and total > budget:
        raise ClusterError(
            f"{cluster.path}: not submitted, a start may cost {total:.1f} GPU-hours, budget_gpu_hours = {budget:g}; "
            "lower [sbatch] time or [suite] gpus, or raise the budget"
        )


def cost(cluster: ClusterFile, planned: Sequence[Job]) -> str:
    """What the night may cost, as far as anything bounds it."""
    if cluster.text("cluster", "on_cpu") == "yes":
        return "no GPU-hours, on_cpu = yes"
    if cluster.is_local:
        return "no bound of GPU-hours: without SLURM nothing ends the run"
    total, budget, restarts = sum(job.gpu_hours for job in planned), cluster.budget, cluster.restarts
    if budget is not None:
        return f"at most {total:.1f} GPU-hours a start, {budget:g} in all starts (budget_gpu_hours)"
    again = f" a start, {total * (1 + restarts):.1f} in all starts (max_restarts = {restarts})" if restarts else ""
    return f"at most {total:.1f} GPU-hours{again}"


def shares(cluster: ClusterFile, planned: Sequence[Job]) -> list[float | None]:
    """GPU-hours that a task of each job may spend in all its starts together; ``None``: whatever it takes."""
    total, budget = sum(job.gpu_hours for job in planned), cluster.budget
    if budget is None or not total:
        return [None for _ in planned]
    # Alike within an array, not by width: its narrow tasks hold as many nodes and GPUs as its wide ones.
    return [budget * job.gpu_hours / total / (len(job.widths) if job.is_array else 1) for job in planned]


def _nodes(width: int, per_node: int) -> int:
    return -(-width // per_node)


# The controller may have taken a job and not come to say so.
_UNSURE = re.compile(r"timed out|Unable to contact|Zero Bytes", re.IGNORECASE)
# And the cluster's name, where there are several; a site's own words may stand before it.
_NUMBER = re.compile(r"^([0-9]+)(?:;.*)?$", re.MULTILINE)


def results_folder(cluster: ClusterFile) -> Path:
    """A new folder for this submission: two of one second do not meet in it."""
    return cluster.results / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def nights_file(cluster: ClusterFile) -> Path:
    """Beside those folders: a line for each night that was submitted, and one for each that was merged."""
    return cluster.results / FILE


def run_here(words: Sequence[str]) -> int:
    """bash's exit code, run on this machine with ``words``; what ends this process ends bash before."""
    before = {number: signal.signal(number, _on_signal) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        # In a session of its own: Ctrl-C would end it at once, and what it starts in the background does not hear it.
        with subprocess.Popen(["bash", *words], stdin=subprocess.DEVNULL, start_new_session=True) as bash:
            try:
                return bash.wait()
            except (KeyboardInterrupt, _SignalledError):
                bash.terminate()  # the nightly script tells pytest, and waits for it
                bash.wait()
                raise
    except _SignalledError as error:
        signal.signal(error.number, signal.SIG_DFL)
        os.kill(os.getpid(), error.number)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _SignalledError(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _on_signal(number: int, _frame: FrameType | None) -> None:
    raise _SignalledError(number)


class RefusedError(ClusterError):
    """sbatch took no job."""


# Which key SLURM's words are about.
_ABOUT = {
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "time limit": "time",
    "feature": "constraint",
    "gres": "gres",
    "option": "options",
    "directive": "options",
    "memory": "options",
}
_USAGE = 'Try "sbatch --help" for more information'
# SLURM says so of options that no node has, and of any job while its nodes are down or drained.
_NOT_NOW = re.compile("configuration is not available|nodes are busy|not available")


def check_taken(cluster: ClusterFile, words: Sequence[str], *, key: str = "", without: Sequence[str] = ()) -> None:
    """Ask sbatch whether it would take a job; silent where it would, or where that depends on the hour.

    ``key`` is the one whose words are in ``words``, and ``without`` are these words without them.

    Raises:
        ClusterError: it would not, by what the file says.
    """
    try:
        sbatch(["--test-only", *words])
    except RefusedError as error:
        said = str(error).removeprefix("sbatch refused: ")
        if _NOT_NOW.search(said) and not (without and _is_taken(without)):
            return
        raise refused(cluster, said, key) from None


def _is_taken(words: Sequence[str]) -> bool:
    try:
        return sbatch(["--test-only", *words]) == ""
    except ClusterError:
        return False


def refused(cluster: ClusterFile, said: str, key: str = "") -> ClusterError:
    """By the key that SLURM's words are about, as far as they tell."""
    said = said.removeprefix("sbatch refused: ").replace("sbatch: error: ", "").removesuffix(_USAGE).strip()
    keys = [name for word, name in _ABOUT.items() if word in said.lower()]
    about = next((name for name in (key, *keys) if name and cluster.text("sbatch", name)), "")
    if about:
        return cluster.wrong("sbatch", about, f"what SLURM takes here (sbatch refused: {said})")
    return RefusedError(f"{cluster.path}: sbatch refused: {said}")


def sbatch(words: Sequence[str]) -> str:
    """Submit; the job's number.

    Raises:
        RefusedError: sbatch is missing or refuses.
        ClusterError: it does not say what it did.
    """
    command = ["sbatch", "--parsable", *words]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise RefusedError(
            f"sbatch: {error}; submit where SLURM is, or write scheduler = local to run on this machine"
        ) from None
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        if _UNSURE.search(said):
            raise ClusterError(f"sbatch: {said}; see squeue whether it took the job")
        raise RefusedError(f"sbatch refused: {said}")
    if "--test-only" in words:
        return ""
    numbers = _NUMBER.findall(done.stdout)
    if not numbers:
        said = " ".join((done.stdout + done.stderr).split()) or "nothing"
        raise ClusterError(f"sbatch said {said}, expected the number of a job; see squeue whether it took one")
    return str(numbers[-1])


def merge_options(cluster: ClusterFile, job_ids: Sequence[str]) -> list[str]:
    """sbatch's options for the job that merges what the others leave, however they end."""
    after = [f"--dependency=afterany:{':'.join(job_ids)}"] if job_ids else []
    known = [
        f"--{key}={cluster.text('sbatch', key)}"
        for key in ("account", "partition", "qos")
        if cluster.text("sbatch", key)
    ]
    return [
        *(*after, "--nodes=1", "--ntasks=1", "--time=00:10:00"),
        # The script writes its own log: with one that cannot be opened SLURM would not start it.
        *(f"--job-name={cluster.text('cluster', 'name')}-merge", f"--output={os.devnull}", *known),
        *cluster.words("sbatch", "merge_options"),
    ]


def merge_arguments(cluster: ClusterFile, results: Path, planned: Sequence[Job]) -> list[str]:
    """Those of `llmperf merge`, for a night's results."""
    expected = [f"--expect=gpus-{width}.json" for job in planned for width in job.widths]
    files = ["--json", str(results / "merged.json"), "--markdown", str(results / "summary.md")]
    told = ["--nights", str(nights_file(cluster)), f"--name={cluster.text('cluster', 'name')}"]
    address = cluster.text("suite", "mail")
    told += [f"--without={word}" for word in cluster.text("suite", "without").replace(",", " ").split()]
    return [str(results), *expected, *files, *told, *([f"--mail={address}"] if address else [])]


def merge_line(cluster: ClusterFile, results: Path, planned: Sequence[Job]) -> str:
    """The shell's line that merges by hand, and tells whom the job would tell."""
    merge = [cluster.text("suite", "python"), "-m", "pytest_llmperf.cli", "merge"]
    merge += merge_arguments(cluster, results, planned)
    return f"cd {shlex.quote(str(cluster.checkout))} && {shlex.join(merge)}"


# The scripts of a night, filled from a cluster file.


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
