"""Readiness: what a night needs and can be looked at before it is submitted; at night nobody is there to mend it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from pytest_llmperf.cli.answer import ClusterError
from pytest_llmperf.cli.merge.notice import Notice
from pytest_llmperf.cli.merge.results_file import last_word
from pytest_llmperf.cli.merge.unjudged import Tests, some_of
from pytest_llmperf.cli.nights import night_log
from pytest_llmperf.cli.nights.night_log import QueuedJob, queued
from pytest_llmperf.cli.submit.cluster_file import ClusterFile
from pytest_llmperf.cli.submit.reserved_options import RESERVED, reserved_in
from pytest_llmperf.cli.submit.sbatch import nights_file, pytest_options
from pytest_llmperf.records.results_document import ResultsDocument, ResultsError, ResultsFile
from pytest_llmperf.run.coverage import is_whole

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


# Which test a night runs at which width: pytest is asked here, by the dry run that the night itself begins with.


# Python on a login node's network file system, and a suite's own imports.
_LISTING_SECONDS = 300.0
# Of pytest's exit codes.
_TESTS_FAILED, _NO_TESTS = 1, 5


@dataclass(frozen=True)
class Asked:
    """What pytest answered; without a plan only ``said`` tells."""

    plan: ResultsDocument | None
    said: str
    """Its last word."""
    code: int | None
    """Its exit code; ``None``: it could not be started, or did not end."""

    @property
    def unknown(self) -> str:
        return f"which test runs at which width is not known here, the job finds it out: {self.said}"


def check(cluster: ClusterFile, asked: Asked) -> None:
    """Refuse a night whose every pytest ends before its first test.

    Raises:
        ClusterError: this one's would.
    """
    # 1: some test cannot be planned, the others run.
    if asked.code is None or asked.code == 0 or (asked.code == _TESTS_FAILED and asked.plan is not None):
        return
    select = cluster.text("suite", "select")
    is_selection = bool(select) and (asked.code == _NO_TESTS or "'-k'" in asked.said)
    what = "tests that pytest can run" if asked.code == _NO_TESTS else "what pytest takes here"
    why = "no test is selected" if asked.code == _NO_TESTS else asked.said
    otherwise = "; where that holds on the nodes alone, write check_python = no"
    raise cluster.wrong("suite", "select" if is_selection else "options", f"{what} ({why}){otherwise}")


def doubts(cluster: ClusterFile, asked: Asked) -> Iterator[str]:
    """Why the night will be red, though pytest runs."""
    if asked.plan is None:
        yield asked.unknown
        return
    tests, widths = Tests.of([], [asked.plan]), {*cluster.widths}
    # Who does not know its width yet may have this one.
    for width in sorted(widths - {*tests.planned.values()}) if tests.collected <= {*tests.planned} else ():
        yield f"no test asks for {width} GPU(s), and without one the night is red: leave {width} out of [suite] gpus"
    for width in sorted({*tests.planned.values()} - widths):
        if not cluster.without.has(width, widths):
            some = some_of(tests.not_reached(width))
            add = f"add {width} there, or to without, or the night is red"
            yield f"{some}: {width} GPU(s) are not among [suite] gpus: {add}"
    if asked.code == _TESTS_FAILED:
        yield f"the dry run of the tests ended with exit code 1: {asked.said}"


def listing(cluster: ClusterFile, asked: Asked) -> Iterator[str]:
    """Lines: each width with its tests, those of none that the night has, and those that say it only when they run.

    Where pytest cannot tell here one line gives its reason: the job asks again.
    """
    plan, said = asked.plan, asked.said
    if plan is None:
        yield asked.unknown
        return
    tests = Tests.of([], [plan])
    widths = cluster.widths
    for width in widths:
        nodes = tests.not_reached(width)
        yield from _tests(f"{width} GPU(s)", nodes)
        if not nodes:
            yield f"  without one the night is red: leave {width} out of gpus"
    have = " ".join(map(str, widths))
    for width in sorted({*tests.planned.values()} - {*widths}):
        nodes = tests.not_reached(width)
        if cluster.without.has(width, {*widths}):
            yield f"{width} GPU(s): {len(nodes)} test(s), which this night is without"
            continue
        title = f"{width} GPU(s), not among gpus = {have}: add it there, or to without, or the night is red"
        yield from _tests(title, nodes)
    silent = sorted(tests.collected - {*tests.planned})
    if silent:
        yield from _tests("no width known: skipped, or known when it runs, by what it asks for first", silent)
    gaps = plan.suite.coverage.gaps if plan.suite else ()
    yield from (f"not collected: {gap}" for gap in gaps if ": collection " in gap)
    if not is_whole(plan) or plan.exit_code:
        what = "told" if is_whole(plan) else "not asked every test"
        yield f"the dry run ended with exit code {plan.exit_code or 0} and has {what}: {said}"


def _tests(title: str, nodes: list[str]) -> Iterator[str]:
    yield f"{title}: {len(nodes)} test(s)"
    yield from (f"  {node}" for node in nodes)


def ask(cluster: ClusterFile) -> Asked:
    """Let pytest plan."""
    with tempfile.TemporaryDirectory(prefix="llmperf-") as folder:
        path = Path(folder) / "plan.json"
        said, code = _run(cluster, path)
        try:
            return Asked(ResultsFile.read(path).document, said, code)
        except ResultsError:
            return Asked(None, said, code)


def _run(cluster: ClusterFile, path: Path) -> tuple[str, int | None]:
    """Pytest's last word, and its exit code."""
    gpus = 0 if cluster.text("cluster", "on_cpu") == "yes" else max(cluster.widths)
    select = cluster.text("suite", "select")
    words = [cluster.text("suite", "python"), "-m", "pytest", *(["-k", select] if select else [])]
    words += ["--gpus", str(gpus), "--perf-dry-run", *pytest_options(cluster)]
    words += ["--maxfail", "0", "--perf-json", str(path)]
    words += ["--perf-launcher", "local"]  # here is no job, whatever the options say of launches in one
    try:
        done = subprocess.run(
            words,
            cwd=cluster.checkout,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_LISTING_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error), None
    said = last_word(done.stdout) or f"pytest ended with exit code {done.returncode}"
    return said, done.returncode


# ``llmperf submit --wait``: a night followed in SLURM's queue until it is merged.


_WAITING_SECONDS = 10.0
# An empty answer may be a controller's that has just begun; one that gives none for so long is spoken of.
_EMPTY, _SILENT_SECONDS = 3, 600.0


def waited(notice: Notice, jobs: Sequence[str], merged_by: str) -> Iterator[str]:
    """A line whenever a job's state changes, and at the end how the night went.

    Raises:
        ClusterError: it is not green, or nobody merged it.
    """
    shown: dict[str, str] = {}
    last: Mapping[str, QueuedJob] = {}
    empty, answered_at = 0, time.monotonic()
    for number in count():
        time.sleep(_WAITING_SECONDS if number else 0)
        found = queued([*jobs, merged_by])
        empty = empty + 1 if found == {} else 0
        if found is not None:
            answered_at = time.monotonic()
        elif time.monotonic() - answered_at >= _SILENT_SECONDS:
            answered_at = time.monotonic()
            yield f"{time.strftime('%H:%M:%S')} squeue does not answer; still waiting"
        for job in jobs if found is not None else ():
            state = str(found[job]) if found and job in found else "ended"
            if shown.get(job) != state:
                shown[job] = state
                yield f"{time.strftime('%H:%M:%S')} {job}: {state}"
        if found is None or (merged_by in found and found[merged_by].is_open):
            continue
        if found or empty >= _EMPTY or _merged(notice) is not None:
            last = found
            break
    if notice.nights is None or (night := _merged(notice)) is None:
        line = f"{night_log.LOST}job {merged_by}, which merges, is {last.get(merged_by, 'gone')}"
        raise ClusterError("; ".join([f"{notice.night}: {line}", *notice.alarm(line)]))
    if night.startswith("red") or (merged_by in last and last[merged_by].state != "COMPLETED") or "; " in night:
        raise ClusterError(f"{notice.night}: {night}")
    yield night


def _merged(notice: Notice) -> str | None:
    """How it was merged."""
    nights = night_log.read(notice.nights) if notice.nights is not None else []
    return next((night.said for night in nights if night.name == notice.night and night.is_merged), None)
