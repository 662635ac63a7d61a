"""`llmperf check`: the engine without pytest gives the verdicts, files and exit codes that pytest gives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from unittest import mock

import pytest

from pytest_llmperf.cli import main
from pytest_llmperf.judge.run_effects import CommonChange
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.run import cases, run_end, whole_run
from pytest_llmperf.run.findings import Concluded
from pytest_llmperf.run.whole_run import WholeRun
from tests.fakes import install
from tests.golden import Golden

SPEC = ("model=llama-tiny", "sequence_length=64", "steps=20")
ID = "llama-tiny-bf16-sdpa-seq64-mbs1-gpus1"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMPERF_LEASE_DIR", str(tmp_path / "leases"))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    install()
    yield
    mock.patch.stopall()


def check(*words: str) -> int:
    return main(["check", *SPEC, "--gpus", "0", *words])


def fake(**values: object) -> None:
    Path("fake.json").write_text(json.dumps(values))


def test_what_has_no_baseline_fails_and_says_how_to_record_it(
    capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    assert check() == 1
    out, error = capsys.readouterr()
    assert f"{ID}: new: " in out
    golden(out)
    assert error.splitlines()[-1] == f"llmperf: {ID}: new"


def test_what_was_recorded_passes_and_what_got_slower_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--update-baselines=new") == 0
    (baseline,) = Path("baselines").rglob("*.json")
    assert json.loads(baseline.read_text())["recorded_by"] == "llmperf check"
    assert check("--perf-json", "out.json") == 0
    document = json.loads(Path("out.json").read_text())
    assert (document["exit_code"], document["results"][0]["verdict"]) == (0, "pass")
    assert document["machine"]["kind"] == "cpu-fake-8c"
    assert (document["spent"]["launches"], document["spent"]["phases"]["other"]) == (1, 10.0)
    fake(step_seconds=1.0)
    capsys.readouterr()
    assert check("--perf-json", "out.json") == 1
    assert f"{ID}: regressed: " in capsys.readouterr().out
    assert json.loads(Path("out.json").read_text())["exit_code"] == 1


def test_a_command_is_no_test_whose_former_case_another_spec_would_replace() -> None:
    assert check("--update-baselines=all") == 0
    assert check("micro_batch_size=2", "--update-baselines=all") == 0
    assert len([*Path("baselines").rglob("*.json")]) == 2


def test_what_all_cases_share_fails_the_command_and_is_in_its_document(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    check("--update-baselines=new")
    change = CommonChange(
        log=0.03, error=0.002, df=9.0, cases=5, gpus=1, is_known=True, is_calibrated=True, together=1.0
    )
    monkeypatch.setattr(
        run_end, "judged_together", lambda _, results: WholeRun(results, change=change, verdict="regressed")
    )
    assert check("--perf-json", "out.json") == 1
    document = json.loads(Path("out.json").read_text())
    assert document["exit_code"] == 1
    assert document["all_cases"]["verdict"] == "regressed"
    assert document["all_cases"]["slower_by"] == pytest.approx(0.0305, abs=1e-4)
    out, error = capsys.readouterr()
    golden(out)
    golden(error)


def test_a_fault_in_judging_the_whole_run_costs_no_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    def broken(*_: object) -> None:
        raise ArithmeticError("no figure")

    check("--update-baselines=new")
    monkeypatch.setattr(whole_run, "_judged_together", broken)
    capsys.readouterr()
    assert check("--perf-json", "out.json") == 1
    document = json.loads(Path("out.json").read_text())
    assert ([each["verdict"] for each in document["results"]], document["exit_code"]) == (["pass"], 1)
    out, error = capsys.readouterr()
    assert f"{ID}" in out
    golden(error)


def test_a_launch_that_fails_is_told_and_the_next_spec_still_runs(
    capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    check("--update-baselines=new")
    fake(by={"seq64": {"fail": "error"}})
    assert main(["check", ID, "model=llama-tiny", "sequence_length=32", "--gpus", "0"]) == 1
    out, error = capsys.readouterr()
    golden(out)
    assert f"llmperf: {ID}: invalid" in error
    assert "seq32-mbs1-gpus1: new" in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "9"], "--gpus 9: only 0 GPU(s) visible here"),
        (["--perf-launches", "3", "--perf-max-launches", "2"], "--perf-launches 3 is more than"),
        (["--perf-json", "none/x.json"], "not a file in a folder that exists"),
        (["--gpus", "x"], "expected a number of GPUs"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_is_launched(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        check(*words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not Path("launches.txt").exists()


def test_words_of_a_spec_may_stand_after_options(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    assert check("attention=eager", "--perf-strict", "micro_batch_size=2") == 1
    assert "eager-seq64-mbs2-gpus1: new" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        check("--perf-strct", "micro_batch_size=2")
    golden(capsys.readouterr().err)
    with pytest.raises(SystemExit):
        main(["report", "--tables", "micro_batch_size=2"])
    assert "error: micro_batch_size=2" in capsys.readouterr().err  # no spec, but a file of results to it


def test_a_case_that_is_held_beside_its_plain_form_is_repeated_so(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(cases, "Cases") as checks:
        checks.return_value.check.side_effect = lambda spec: Concluded(
            result=CaseResult(
                id=spec.id,
                digest=spec.digest,
                nodeid="",
                machine="m",
                verdict="invalid",
                reason="it learns otherwise",
            ),
            fails=True,
        )
        assert check("--perf-parity") == 1
    assert "--gpus 0 --perf-parity --perf-baselines" in capsys.readouterr().out


def test_a_spec_that_cannot_be_is_one_line(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    assert main(["check", *SPEC, "min_steps=21", "--gpus", "0"]) == 1
    golden(capsys.readouterr().err)


def test_no_pytest_and_no_torch_are_imported() -> None:
    code = """
import sys
import pytest_llmperf.cli
try:
    pytest_llmperf.cli.main(["check", "model=llama-tiny", "min_steps=0"])
except SystemExit:
    pass
import pytest_llmperf.run.cases
print([name for name in ("pytest", "_pytest", "torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_case_that_nobody_has_launched_is_found_by_its_id(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    assert main(["check", *SPEC, "--static", "--update-baselines=new"]) == 0
    assert Path(f"baselines/static/{ID}.json").exists()
    assert main(["check", ID, "--static"]) == 0
    assert f"{ID}" in capsys.readouterr().out
    assert main(["check", ID.replace("mbs1", "mbs2"), "--static"]) == 1
    golden(capsys.readouterr().err)


def test_parity_takes_launches(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    with pytest.raises(SystemExit):
        check("--perf-parity", "--static")
    golden(capsys.readouterr().err)


def test_a_model_of_few_positions_is_named_by_what_it_was_given(
    capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    """Its defaults do not fit it, and are asked for nowhere."""
    config = json.loads((files("pytest_llmperf") / "settings/configs/llama-tiny.json").read_text())
    Path("short.json").write_text(json.dumps({**config, "max_position_embeddings": 128}))
    assert main(["check", "model=short.json", "sequence_length=64", "--gpus", "0"]) == 1
    golden(capsys.readouterr().out)


def test_what_its_host_cannot_hold_is_refused_before_it_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setattr("pytest_llmperf.launch.machine.host_memory_bytes", lambda: 8 * 2**30)
    assert main(["check", "model=llama-3.2-1b", "model_precision=fp32", "--gpus", "0"]) == 1
    said = capsys.readouterr().out
    golden(said)
    assert "launch 1" not in said
