"""Readiness: what a night needs and can be checked before it is submitted; at night it cannot be mended."""

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
from pytest_llmperf.cli.night import night_log
from pytest_llmperf.cli.night.cluster_file import RESERVED, ClusterFile, reserved_in
from pytest_llmperf.cli.night.night_log import Notice, QueuedJob, answer_of, queued
from pytest_llmperf.cli.night.results_file import last_word
from pytest_llmperf.cli.night.sbatch import pytest_options
from pytest_llmperf.cli.night.unjudged import Tests, some_of
from pytest_llmperf.records.results_document import ResultsDocument, ResultsError, ResultsFile
from pytest_llmperf.run.coverage import is_whole

# Much more than an import takes from a busy file system; a wrapper that asks for a password takes for ever.
_SECONDS = 120
# Python on a login node's network file system, and a suite's own imports.
_LISTING_SECONDS = 300.0
# pytest's exit codes.
_TESTS_FAILED, _NO_TESTS = 1, 5
_ON_NODES = "; where that holds on the nodes alone, write check_python = no"


def warnings(cluster: ClusterFile) -> Iterator[str]:
    """What may go wrong at night.

    Raises:
        ClusterError: something certainly will.
    """
    words = cluster.words("suite", "options")
    # Before the first option each word is a path; behind one it may be its value.
    first = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    for word in words[:first] if "--pyargs" not in words else ():
        if not (cluster.checkout / word.partition("::")[0]).exists():
            raise cluster.wrong("suite", "options", f"tests that are there, and {cluster.checkout / word} is not")
    text = os.environ.get("PYTEST_ADDOPTS", "")
    try:
        option = reserved_in(shlex.split(text))
    except ValueError:
        option = ""  # pytest says it better
    if option:
        raise ClusterError(f"PYTEST_ADDOPTS={text}: sbatch hands it on; expected no {option}, {RESERVED[option]}")
    if cluster.says("suite", "check_python"):
        _check_python(cluster)
    if (mail := cluster.text("suite", "mail")) and shutil.which("mail") is None:
        if cluster.is_local:
            raise cluster.wrong("suite", "mail", "none here, where no program `mail` is on PATH")
        yield (
            f"[suite] mail = {mail}: no program `mail` is on PATH here; where the node of the job that merges has none "
            f"either, that job fails and {cluster.nights_file} says why"
        )
    options = cluster.words("sbatch", "options")
    is_alone = cluster.says("sbatch", "exclusive") or any(word.startswith("--exclusive") for word in options)
    if not cluster.is_local and not is_alone:
        yield (
            "[sbatch] exclusive = no: other jobs may run on the same nodes, and the figures depend on them (two nights "
            "side by side: 41 % slower); write exclusive = yes"
        )
    yield from _launch(cluster)


def _check_python(cluster: ClusterFile) -> None:
    command = [cluster.text("suite", "python"), "-c", "import pytest, pytest_llmperf"]
    # Not a pipe: what it started may hold that open once it has ended.
    with tempfile.TemporaryFile() as said:
        why = ""
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
            why = error.strerror or str(error)
        except subprocess.TimeoutExpired:
            why = f"not within {_SECONDS} s"
        else:
            said.seek(0)
            lines = said.read().decode("utf-8", "replace").split("\n")
            if done.returncode != 0:
                why = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {done.returncode}")
    if why:
        what = "a Python that imports pytest and pytest_llmperf"
        raise cluster.wrong("suite", "python", f"{what} ({why}){_ON_NODES}")


def _launch(cluster: ClusterFile) -> Iterator[str]:
    """What each node needs to begin a launch, as far as this machine can show it."""
    prefix, srun, modules = (cluster.words("launch", key) for key in ("prefix", "srun", "modules"))
    python, found = cluster.text("launch", "python"), dict[str, str]()
    if prefix and not modules and shutil.which(prefix[0]) is None:
        found[f"prefix = {shlex.join(prefix)}"] = f"no program {prefix[0]} here"
    if python and not prefix and not srun and not modules and shutil.which(python) is None:
        found[f"python = {python}"] = "no such program here"
    if srun and not cluster.is_local:
        found[f"srun = {shlex.join(srun)}"] = _why_it_fails([shutil.which("srun") or "", *srun, "--version"])
    if modules:
        load = f"type module >/dev/null || exit 0; module load {shlex.join(modules)}"
        found[f"modules = {shlex.join(modules)}"] = _why_it_fails(["bash", "-lc", load])
    for what, why in found.items():
        if why:
            yield f"{cluster.path}: [launch] {what}: {why}; the nodes may differ, and if not every launch fails"


def _why_it_fails(command: Sequence[str]) -> str:
    """Empty where it does not, or where that cannot be tried."""
    try:
        done = answer_of(command, _SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["it fails"]
    return lines[0] if done.returncode else ""


# Which test a night runs at which width: pytest is asked here, by the dry run that the night itself begins with.


@dataclass(frozen=True)
class Asked:
    """What pytest answered; without a plan ``said`` is all there is."""

    plan: ResultsDocument | None
    said: str
    """Its last word."""
    code: int | None
    """Its exit code; ``None``: it could not be started, or did not end."""

    @property
    def unknown(self) -> str:
        return f"which test runs at which width is not known here, the job finds it out: {self.said}"


def ask(cluster: ClusterFile) -> Asked:
    """Let pytest plan."""
    gpus, select = 0 if cluster.on_cpu else max(cluster.widths), cluster.text("suite", "select")
    with tempfile.TemporaryDirectory(prefix="llmperf-") as folder:
        path = Path(folder) / "plan.json"
        words = [cluster.text("suite", "python"), "-m", "pytest", *(["-k", select] if select else [])]
        words += ["--gpus", str(gpus), "--perf-dry-run", *pytest_options(cluster)]
        # Here is no job, whatever the options say of launches in one.
        words += ["--maxfail", "0", "--perf-json", str(path), "--perf-launcher", "local"]
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
            return Asked(None, str(error), None)
        said = last_word(done.stdout) or f"pytest ended with exit code {done.returncode}"
        try:
            return Asked(ResultsFile.read(path).document, said, done.returncode)
        except ResultsError:
            return Asked(None, said, done.returncode)


def check(cluster: ClusterFile, asked: Asked) -> None:
    """Refuse a night whose every pytest ends before its first test.

    Raises:
        ClusterError: this one's would.
    """
    # 1: some test cannot be planned, the others run.
    if asked.code is None or asked.code == 0 or (asked.code == _TESTS_FAILED and asked.plan is not None):
        return
    key = "select" if cluster.text("suite", "select") and "'-k'" in asked.said else "options"
    what, why = "what pytest takes here", asked.said
    if asked.code == _NO_TESTS:
        key = "select" if cluster.text("suite", "select") else "options"
        what, why = "tests that pytest can run", "no test is selected"
    raise cluster.wrong("suite", key, f"{what} ({why}){_ON_NODES}")


def doubts(cluster: ClusterFile, asked: Asked) -> Iterator[str]:
    """Why the night will be red, though pytest runs."""
    if asked.plan is None:
        yield asked.unknown
        return
    tests, widths = Tests.of([], [asked.plan]), {*cluster.widths}
    planned = {*tests.planned.values()}
    # A test that does not know its width yet may have this one.
    for width in sorted(widths - planned) if tests.collected <= {*tests.planned} else ():
        yield f"no test asks for {width} GPU(s), and without one the night is red: leave {width} out of [suite] gpus"
    for width in sorted(planned - widths):
        if not cluster.without.has(width, widths):
            some = some_of(tests.not_reached(width))
            add = f"add {width} there, or to without, or the night is red"
            yield f"{some}: {width} GPU(s) are not among [suite] gpus: {add}"
    if asked.code == _TESTS_FAILED:
        yield f"the dry run of the tests ended with exit code 1: {asked.said}"


def listing(cluster: ClusterFile, asked: Asked) -> Iterator[str]:
    """Lines: each width with its tests, those of none that the night has, and those that say it only when they run.

    Where pytest cannot say it here one line gives its reason: the job asks again.
    """
    plan, widths = asked.plan, cluster.widths
    if plan is None:
        yield asked.unknown
        return
    tests, have = Tests.of([], [plan]), " ".join(map(str, widths))
    for width in (*widths, *sorted({*tests.planned.values()} - {*widths})):
        nodes, title = tests.not_reached(width), f"{width} GPU(s)"
        if width not in widths and cluster.without.has(width, {*widths}):
            yield f"{title}: {len(nodes)} test(s), which this night is without"
            continue
        if width not in widths:
            title += f", not among gpus = {have}: add it there, or to without, or the night is red"
        yield from _tests(title, nodes)
        if width in widths and not nodes:
            yield f"  without one the night is red: leave {width} out of gpus"
    silent = sorted(tests.collected - {*tests.planned})
    if silent:
        yield from _tests("no width known: skipped, or known when it runs, by what it asks for first", silent)
    gaps = plan.suite.coverage.gaps if plan.suite else ()
    yield from (f"not collected: {gap}" for gap in gaps if ": collection " in gap)
    if not is_whole(plan) or plan.exit_code:
        what = "told" if is_whole(plan) else "not asked every test"
        yield f"the dry run ended with exit code {plan.exit_code or 0} and has {what}: {asked.said}"


def _tests(title: str, nodes: Sequence[str]) -> Iterator[str]:
    yield f"{title}: {len(nodes)} test(s)"
    yield from (f"  {node}" for node in nodes)


# ``llmperf submit --wait``: a night followed in SLURM's queue until it is merged.


_WAITING_SECONDS = 10.0
# An empty answer may be a controller's that has just begun; one that gives none for so long is spoken of.
_EMPTY, _SILENT_SECONDS = 3, 600.0


def waited(notice: Notice, jobs: Sequence[str], merged_by: str) -> Iterator[str]:
    """A line whenever a job's state changes, and at the end how the night went.

    Raises:
        ClusterError: it is not green, or was never merged.
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
    if (night := _merged(notice)) is None:
        line = f"{night_log.LOST}job {merged_by}, which merges, is {last.get(merged_by, 'gone')}"
        raise ClusterError("; ".join([f"{notice.night}: {line}", *notice.alarm(line)]))
    if night.startswith("red") or (merged_by in last and last[merged_by].state != "COMPLETED") or "; " in night:
        raise ClusterError(f"{notice.night}: {night}")
    yield night


def _merged(notice: Notice) -> str | None:
    """How it was merged."""
    nights = night_log.read(notice.nights) if notice.nights is not None else []
    return next((night.said for night in nights if night.name == notice.night and night.is_merged), None)
