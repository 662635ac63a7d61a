"""`llmperf submit`: the scripts of a night given to sbatch, or run here; the one that merges their results the last."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from pytest_llmperf.cli.command_error import ClusterError
from pytest_llmperf.cli.nights.night_log import FILE
from pytest_llmperf.cli.submit.cluster_file import ClusterFile
from pytest_llmperf.cli.submit.sbatch_jobs import Job

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
