"""Readiness: what a night needs and can be looked at before it is submitted; at night nobody is there to mend it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence

from pytest_llmperf.cli.command_error import ClusterError
from pytest_llmperf.cli.submit.cluster_file import ClusterFile
from pytest_llmperf.cli.submit.reserved_options import RESERVED, reserved_in
from pytest_llmperf.cli.submit.sbatch import nights_file

# Much more than an import takes from a busy file system; a wrapper that asks for a password takes for ever.
_SECONDS = 120


def warnings(cluster: ClusterFile) -> Iterator[str]:
    """What may go wrong at night.

    Raises:
        ClusterError: something certainly will.
    """
    _check_tests(cluster)
    _check_environment()
    if cluster.text("suite", "check_python") == "yes":
        _check_python(cluster)
    yield from _mail(cluster)
    yield from _neighbours(cluster)
    yield from _launch(cluster)


def _check_tests(cluster: ClusterFile) -> None:
    words = cluster.words("suite", "options")
    # Before the first option each word is a path; behind one it may be its value.
    first = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    for word in words[:first]:
        if "--pyargs" not in words and not (cluster.checkout / word.partition("::")[0]).exists():
            raise cluster.wrong("suite", "options", f"tests that are there, and {cluster.checkout / word} is not")


def _check_environment() -> None:
    text = os.environ.get("PYTEST_ADDOPTS", "")
    try:
        option = reserved_in(shlex.split(text))
    except ValueError:
        return  # pytest says it better
    if option is not None:
        raise ClusterError(f"PYTEST_ADDOPTS={text}: sbatch hands it on; expected no {option}, {RESERVED[option]}")


def _check_python(cluster: ClusterFile) -> None:
    what = "a Python that imports pytest and pytest_llmperf"
    otherwise = "; where that holds on the nodes alone, write check_python = no"
    command = [cluster.text("suite", "python"), "-c", "import pytest, pytest_llmperf"]
    # Not a pipe: what it started may hold that open once it has ended.
    with tempfile.TemporaryFile() as said:
        try:
            done = subprocess.run(
                command,
                cwd=cluster.checkout,
                check=False,
                timeout=_SECONDS,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
        except OSError as error:
            raise cluster.wrong("suite", "python", f"{what} ({error.strerror or error}){otherwise}") from None
        except subprocess.TimeoutExpired:
            raise cluster.wrong("suite", "python", f"{what} (not within {_SECONDS} s){otherwise}") from None
        said.seek(0)
        lines = said.read().decode("utf-8", "replace").split("\n")
    if done.returncode != 0:
        last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {done.returncode}")
        raise cluster.wrong("suite", "python", f"{what} ({last}){otherwise}")


def _mail(cluster: ClusterFile) -> Iterator[str]:
    if cluster.text("suite", "mail") and shutil.which("mail") is None:
        if cluster.is_local:
            raise cluster.wrong("suite", "mail", "none here, where no program `mail` is on PATH")
        yield (
            f"[suite] mail = {cluster.text('suite', 'mail')}: no program `mail` is on PATH here; where the node of the "
            f"job that merges has none either, that job fails and {nights_file(cluster)} says why"
        )


def _neighbours(cluster: ClusterFile) -> Iterator[str]:
    options = cluster.words("sbatch", "options")
    is_alone = cluster.text("sbatch", "exclusive") == "yes" or any(word.startswith("--exclusive") for word in options)
    if not cluster.is_local and not is_alone:
        yield (
            "[sbatch] exclusive = no: other jobs may run on the same nodes, and the figures depend on them (two nights "
            "side by side: 41 % slower); write exclusive = yes"
        )


def _launch(cluster: ClusterFile) -> Iterator[str]:
    """What each node needs to begin a launch, as far as this machine can tell of it."""
    prefix, srun, python = (
        cluster.words("launch", "prefix"),
        cluster.words("launch", "srun"),
        cluster.text("launch", "python"),
    )
    modules = cluster.words("launch", "modules")
    nodes = "the nodes may differ, and if not every launch fails"
    if prefix and not modules and shutil.which(prefix[0]) is None:
        yield f"{cluster.path}: [launch] prefix = {shlex.join(prefix)}: no program {prefix[0]} here; {nodes}"
    if python and not prefix and not srun and not modules and shutil.which(python) is None:
        yield f"{cluster.path}: [launch] python = {python}: no such program here; {nodes}"
    if srun and not cluster.is_local and (why := _said([shutil.which("srun") or "", *srun, "--version"])):
        yield f"{cluster.path}: [launch] srun = {shlex.join(srun)}: {why}; {nodes}"
    if modules:
        load = f"type module >/dev/null || exit 0; module load {shlex.join(modules)}"
        if why := _said(["bash", "-lc", load]):
            yield f"{cluster.path}: [launch] modules = {shlex.join(modules)}: {why}; {nodes}"


def _said(command: Sequence[str]) -> str:
    """Why it fails; empty where it does not, or where nobody can tell."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return (
        next((line.strip() for line in done.stderr.splitlines() if line.strip()), "it fails") if done.returncode else ""
    )
