"""The page of a night of the ladder, made of the committed baselines, as a browser shows it."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_llmperf.analysis.ladder import Rung
from pytest_llmperf.judge.baseline import Baseline, BaselineStore
from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.verdict import judge
from pytest_llmperf.records.result import CaseResult, Spent
from pytest_llmperf.report.results_json import document
from tests.browser import browser

_WIDTH, _HEIGHT = 1280, 840


def night(rungs: Sequence[Rung], store: BaselineStore, machine: str) -> dict[str, Any]:
    """What ``--perf-json`` has of a run in which each rung's newest launches were held against those before them."""
    results = [_result(rung, stored, machine) for rung in rungs if (stored := store.load(machine, rung.spec))]
    phases: dict[str, float] = {}
    for launch in (launch for result in results for launch in result.launches):
        for name, seconds in launch.phases.items():
            phases[name] = phases.get(name, 0.0) + seconds
    spent = Spent(launches=sum(len(result.launches) for result in results), phases=phases)
    gpu = {"name": "NVIDIA H200", "memory_bytes": 150_754_820_096}
    return document({"kind": machine, "cores": 32, "gpus": [gpu]}, results, spent) | {"exit_code": 0}


def _result(rung: Rung, stored: Baseline, machine: str) -> CaseResult:
    newest = stored.newest
    before = replace(stored, launches=stored.launches[: -len(newest)] or stored.launches)
    judgement = judge(newest, before, Policy.for_gpu())
    return CaseResult(
        id=rung.spec.id,
        digest=rung.spec.digest,
        nodeid=f"perf_tests/test_ladder.py::test_rung[{rung.spec.id}]",
        machine=machine,
        verdict=judgement.verdict,
        reason=judgement.reason,
        checks=judgement.checks,
        launches=newest,
        rung=rung.number,
        reference=rung.reference,
        differences=before.launches[-1].differences(newest[-1]),
    )


def written(values: dict[str, Any], folder: Path) -> Path:
    """The page, by the command that users have."""
    results, page = folder / "results.json", folder / "page.html"
    results.write_text(json.dumps(values), encoding="utf-8")
    command = [sys.executable, "-m", "pytest_llmperf.cli", "report", str(results), "--html", str(page)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return page


def photographed(html: Path, picture: Path) -> None:
    """Its first screens, at a desktop's width, as PNG."""
    with browser() as page:
        page.open(html.as_uri(), width=_WIDTH, height=_HEIGHT)
        picture.write_bytes(base64.b64decode(page.call("Page.captureScreenshot", format="png")["data"]))
