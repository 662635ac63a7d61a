"""`llmperf submit`: the scripts of a night given to sbatch, or run here; then the job that merges their results."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from pytest_llmperf.cli.clusterfile import ClusterError, ClusterFile
from pytest_llmperf.cli.jobs import Job
from pytest_llmperf.cli.script import log_name


def results_folder(cluster: ClusterFile) -> Path:
    """A new folder for this submission: two of one second do not meet in it."""
    return cluster.results / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


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
        *(f"--job-name={cluster.text('cluster', 'name')}-merge", f"--output={log_name(results, 'merge.log')}", *known),
        *cluster.words("sbatch", "merge_options"),
        f"--wrap={merge_line(cluster, results, planned)}",
    ]


def merge_line(cluster: ClusterFile, results: Path, planned: Sequence[Job]) -> str:
    """The shell's line that merges, and mails the summary where an address is given."""
    expected = [f"--expect=gpus-{width}.json" for job in planned for width in job.widths]
    merge = [cluster.text("suite", "python"), "-m", "pytest_llmperf.cli", "merge", str(results), *expected]
    merge += ["--json", str(results / "merged.json"), "--markdown", str(results / "summary.md")]
    line = f"cd {shlex.quote(str(cluster.checkout))} && {shlex.join(merge)}"
    address = cluster.text("suite", "mail")
    if not address:
        return line
    summary, name = shlex.quote(str(results / "summary.md")), shlex.quote(cluster.text("cluster", "name"))
    text = f"{{ cat {summary} || echo no summary was written; }}"
    mail = f'mail -s {name}": $([ $code -eq 0 ] && echo green || echo RED)" {shlex.quote(address)}'
    return f"{line}; code=$?; {text} | {mail}; exit $code"
