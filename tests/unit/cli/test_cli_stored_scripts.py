"""Every command and page over a shelf that holds scripts: nothing there has a model, and no rate is one of tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_llmperf.judge.policy import Policy
from pytest_llmperf.judge.verdict import judge
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.report.results_json import document
from pytest_llmperf.settings.spec import ScriptSpec
from tests.fakes import Fake, launch_of
from tests.golden import Golden
from tests.shelf import accept, keep, llmperf_on

MACHINE = "nvidia-h200-140gib"
TRACE = {"kernel": {"gemm": 10.0}, "wait": {"cudaStreamSynchronize": 1.0}}
WIDE = "torchrun --nproc-per-node {gpus} other.py"
SPECS = {
    "unknown": ScriptSpec(command="python train.py", steps=8),
    "sequences": ScriptSpec(command=WIDE, gpus=1, steps=8, tokens="sequences:64"),
    "counted": ScriptSpec(command=WIDE, gpus=2, steps=8),
}


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    results = []
    for tokens, spec in SPECS.items():
        fake = Fake(
            trace=TRACE,
            losses=() if tokens == "unknown" else None,
            evidence={"tokens": tokens, "losses": "unknown", "command": spec.command},
        )
        launches = [replace(launch_of(spec, fake), started_at=f"2026-01-0{day}T00:00:00Z") for day in (1, 2)]
        checks = judge(launches, None, Policy.for_gpu()).checks
        accepted = accept(
            None,
            judged=None,
            spec=spec,
            machine=MACHINE,
            launches=launches,
            verdict="new",
            checks=checks,
            reason="",
            recorded_at="2026-01-01T00:00:00Z",
            recorded_by="t.py::t",
        )
        keep(tmp_path / "baselines", accepted)
        result = CaseResult(
            id=spec.id,
            digest=spec.digest,
            nodeid="t.py::t",
            machine=MACHINE,
            verdict="pass",
            reason="",
            checks=checks,
            launches=tuple(launches),
        )
        results.append(result)
    run = document({"kind": MACHINE}, results)
    (tmp_path / "run.json").write_text(json.dumps(run))
    return tmp_path


ONE, *_ = (spec.id for spec in SPECS.values())


@pytest.mark.parametrize(
    "command",
    [
        "baselines list",
        f"baselines show {ONE}",
        "report --tables",
        f"plan {ONE}",
        f"check {ONE} --static",
    ],
)
def test_a_stored_script_is_told(command: str, shelf: Path, capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    code, out, errors = llmperf_on(shelf / "baselines", capsys)(command)
    golden(f"{code}\n{out}\n{errors}")


def test_a_page_and_exports_have_the_rate_that_there_is(
    shelf: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    run = llmperf_on(shelf / "baselines", capsys)
    assert run(f"report --html {shelf / 'page.html'} {shelf / 'run.json'}")[0] == 0
    page = (shelf / "page.html").read_text()
    assert "steps/s" in page
    assert "sequences/s" in page
    golden(run(f"history --from {shelf / 'run.json'}")[1])
