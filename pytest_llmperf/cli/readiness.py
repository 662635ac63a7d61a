"""Readiness: what a night needs and can be checked before it is submitted; at night it cannot be mended."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_llmperf.cli.answer import ClusterError
from pytest_llmperf.cli.cluster_file import RESERVED, ClusterFile, reserved_in
from pytest_llmperf.cli.night_tests import Tests, last_word, some_of
from pytest_llmperf.cli.sbatch import answer_of, pytest_options
from pytest_llmperf.records.results_document import ResultsDocument, ResultsError, ResultsFile
from pytest_llmperf.run.findings import is_whole

# Much more than an import takes from a busy file system; a wrapper that asks for a password takes for ever.
_SECONDS = 120
# Python on a login node's network file system, and a suite's own imports.
_LISTING_SECONDS = 300.0
# pytest's exit codes.
_TESTS_FAILED, _NO_TESTS = 1, 5
_ON_NODES = "; where that holds on the nodes alone, write check_python = no"


def warnings(cluster: ClusterFile) -> Iterator[str]:
    """What may go wrong at night; a ClusterError says what certainly will."""
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
    if cluster.value("suite", "check_python"):
        python = [cluster.text("suite", "python"), "-c", "import pytest, pytest_llmperf"]
        if why := _why_it_fails(python, cluster.checkout):
            what = "a Python that imports pytest and pytest_llmperf"
            raise cluster.wrong("suite", "python", f"{what} ({why}){_ON_NODES}")
    options = cluster.words("sbatch", "options")
    if not (cluster.value("sbatch", "exclusive") or any(word.startswith("--exclusive") for word in options)):
        yield (
            "[sbatch] exclusive = no: other jobs may run on the same nodes, and the figures depend on them (two nights "
            "side by side: 41 % slower); write exclusive = yes"
        )


def _why_it_fails(command: Sequence[str], folder: Path) -> str:
    try:
        done = answer_of(command, _SECONDS, folder)
    except OSError as error:
        return error.strerror or str(error)
    except subprocess.TimeoutExpired:
        return f"not within {_SECONDS} s"
    lines = [line.strip() for line in done.stderr.split("\n") if line.strip()]
    return [f"exit code {done.returncode}", *lines][-1] if done.returncode else ""


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
    gpus, select = 0 if cluster.on_cpu else max(cluster.widths), cluster.text("suite", "select")
    with tempfile.TemporaryDirectory(prefix="llmperf-") as folder:
        path = Path(folder) / "plan.json"
        words = [cluster.text("suite", "python"), "-m", "pytest", *(["-k", select] if select else [])]
        words += ["--gpus", str(gpus), "--perf-dry-run", *pytest_options(cluster)]
        # Here is no job, whatever the options say of launches in one.
        words += ["--maxfail", "0", "--perf-json", str(path), "--perf-launcher", "local"]
        try:
            done = answer_of(words, _LISTING_SECONDS, cluster.checkout)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Asked(None, str(error), None)
        said = last_word(done.stdout + done.stderr) or f"pytest ended with exit code {done.returncode}"
        try:
            return Asked(ResultsFile.read(path).document, said, done.returncode)
        except ResultsError:
            return Asked(None, said, done.returncode)


def check(cluster: ClusterFile, asked: Asked) -> None:
    """Refuse, by a ClusterError, a night whose every pytest ends before its first test."""
    # 1: some test cannot be planned, the others run.
    if asked.code is None or asked.code == 0 or (asked.code == _TESTS_FAILED and asked.plan is not None):
        return
    selects, what, why = bool(cluster.text("suite", "select")), "what pytest takes here", asked.said
    if asked.code == _NO_TESTS:
        what, why = "tests that pytest can run", "no test is selected"
    elif "'-k'" not in asked.said:
        selects = False
    raise cluster.wrong("suite", "select" if selects else "options", f"{what} ({why}){_ON_NODES}")


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
    if asked.code:
        yield f"the dry run of the tests ended with exit code {asked.code}: {asked.said}"


def listing(cluster: ClusterFile, asked: Asked) -> Iterator[str]:
    """Each width with its tests, and those that say theirs when they run."""
    plan, widths = asked.plan, cluster.widths
    if plan is None:
        return
    tests = Tests.of([], [plan])
    for width in (*widths, *sorted({*tests.planned.values()} - {*widths})):
        nodes, title = tests.not_reached(width), f"{width} GPU(s)"
        if width not in widths and cluster.without.has(width, {*widths}):
            yield f"{title}: {len(nodes)} test(s), which this night is without"
        else:
            yield from _tests(title, nodes)
    if silent := sorted(tests.collected - {*tests.planned}):
        yield from _tests("no width known: skipped, or known when it runs, by what it asks for first", silent)
    gaps = plan.suite.coverage.gaps if plan.suite else ()
    yield from (f"not collected: {gap}" for gap in gaps if ": collection " in gap)
    if not is_whole(plan):
        yield f"the dry run has not asked every test: {asked.said}"


def _tests(title: str, nodes: Sequence[str]) -> Iterator[str]:
    yield f"{title}: {len(nodes)} test(s)"
    yield from (f"  {node}" for node in nodes)
