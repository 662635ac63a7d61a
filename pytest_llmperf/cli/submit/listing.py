"""Which test a night runs at which width: pytest is asked here, by the dry run that the night itself begins with."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pytest_llmperf.cli.merge.job_log import last_word
from pytest_llmperf.cli.merge.results_file import Part
from pytest_llmperf.cli.merge.unjudged import Tests
from pytest_llmperf.cli.submit.cluster_file import ClusterFile
from pytest_llmperf.cli.submit.sbatch_script import pytest_options
from pytest_llmperf.run.coverage import is_whole

# Python on a login node's network file system, and a suite's own imports.
_SECONDS = 300.0


def listing(cluster: ClusterFile) -> Iterator[str]:
    """Lines: each width with its tests, those of none that the night has, and those that say it only when they run.

    Where pytest cannot tell here, a login node without torch say, one line gives its reason: the job asks again.
    """
    with tempfile.TemporaryDirectory(prefix="llmperf-") as folder:
        path = Path(folder) / "plan.json"
        said = _ask(cluster, path)
        try:
            plan = Part.read(path).document
        except (OSError, ValueError):
            yield f"which test runs at which width is not known here, the job finds it out: {said}"
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


def _ask(cluster: ClusterFile, path: Path) -> str:
    """Let pytest write its plan; its last word."""
    gpus = 0 if cluster.text("cluster", "on_cpu") == "yes" else max(cluster.widths)
    select = cluster.text("suite", "select")
    words = [cluster.text("suite", "python"), "-m", "pytest", *(["-k", select] if select else [])]
    words += ["--gpus", str(gpus), "--perf-dry-run", *pytest_options(cluster)]
    words += ["--maxfail", "0", "--perf-json", str(path)]
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
        return str(error)
    return last_word(done.stdout) or f"pytest ended with exit code {done.returncode}"
