"""Which test a night runs at which width: pytest is asked here, by the dry run that the night itself begins with."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_llmperf.cli.merge.job_log import last_word
from pytest_llmperf.cli.merge.results_file import Part
from pytest_llmperf.cli.merge.unjudged import Tests, some_of
from pytest_llmperf.cli.submit.cluster_file import ClusterFile
from pytest_llmperf.cli.submit.sbatch_script import pytest_options
from pytest_llmperf.run.coverage import is_whole

# Python on a login node's network file system, and a suite's own imports.
_SECONDS = 300.0
# Of pytest's exit codes.
_TESTS_FAILED, _NO_TESTS = 1, 5


@dataclass(frozen=True)
class Asked:
    """What pytest answered; without a plan only ``said`` tells."""

    plan: Mapping[str, Any] | None
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
    gaps = plan.get("suite", {}).get("coverage", {}).get("gaps", [])
    yield from (f"not collected: {gap}" for gap in gaps if ": collection " in gap)
    if not is_whole(plan) or plan.get("exit_code"):
        what = "told" if is_whole(plan) else "not asked every test"
        yield f"the dry run ended with exit code {plan.get('exit_code', 0)} and has {what}: {said}"


def _tests(title: str, nodes: list[str]) -> Iterator[str]:
    yield f"{title}: {len(nodes)} test(s)"
    yield from (f"  {node}" for node in nodes)


def ask(cluster: ClusterFile) -> Asked:
    """Let pytest plan."""
    with tempfile.TemporaryDirectory(prefix="llmperf-") as folder:
        path = Path(folder) / "plan.json"
        said, code = _run(cluster, path)
        try:
            return Asked(Part.read(path).document, said, code)
        except (OSError, ValueError):
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
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error), None
    said = last_word(done.stdout) or f"pytest ended with exit code {done.returncode}"
    return said, done.returncode
