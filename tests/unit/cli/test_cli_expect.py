"""``llmperf expect``: a range, what limits a step, and where a measured one stands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_llmperf.judge.baseline import BaselineStore
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.report.results_json import document, write_json
from pytest_llmperf.run.derived_metrics import newest_launch
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import launch_of
from tests.golden import REPOSITORY, Golden
from tests.shelf import Run, keep, llmperf_on

H200 = "nvidia-h200-140gib"
ROWS = ["llama-3.2-1b-bf16-sdpa-mbs7-gpus1", "llama-3.2-1b-bf16-sdpa-mbs14-gpus1", "llama-3.2-1b-bf16-eager-mbs7-gpus1"]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Three stored cases of one GPU."""
    stored = BaselineStore(REPOSITORY / "baselines").baselines(H200)
    keep(tmp_path / "kept", *(one for one in stored if one.id in ROWS))
    return llmperf_on(tmp_path / "kept", capsys)


def results(path: Path, *ids: str, kind: str = H200) -> Path:
    """Launches of these cases, as ``--perf-json`` has them."""
    found = []
    for one in BaselineStore(REPOSITORY / "baselines").baselines(H200):
        launch = newest_launch(TrainSpec.from_dict(one.spec), H200, REPOSITORY / "baselines") if one.id in ids else None
        if launch is not None:
            case = CaseResult(
                id=one.id, digest=one.digest, nodeid="", machine=H200, verdict="pass", reason="", launches=(launch,)
            )
            found.append(case)
    write_json(path, document({"kind": kind}, found))
    return path


@pytest.mark.parametrize(
    "words",
    [
        [ROWS[0]],
        ["model=llama-3.2-1b", "micro_batch_size=10", "gpu=h200"],
        ["model=llama-3.2-1b", "micro_batch_size=10", "gpu=a100"],
    ],
    ids=["stored", "in pairs", "by published rates"],
)
def test_a_case_has_a_page(run: Run, golden: Golden, words: list[str]) -> None:
    code, out, err = run("expect", *words)
    assert (code, err) == (0, "")
    golden(out)


def test_programs_get_one_document(run: Run) -> None:
    _, out, _ = run("expect", ROWS[0], "gpu=h200", "--json")
    told = json.loads(out)
    assert told["range"][0] < told["tokens_per_second_per_gpu"] < told["range"][1]
    assert told["nearest"] == {"id": ROWS[1], "machine": H200}
    assert told["measured"] == pytest.approx(7168 / 0.157, rel=0.02)


def test_a_result_of_other_settings_is_held_beside_what_was_asked(run: Run, tmp_path: Path, golden: Golden) -> None:
    """As a script's is, of which its user says what it trains."""
    path = results(tmp_path / "perf.json", ROWS[2])
    _, out, _ = run("expect", "model=llama-3.2-1b", "micro_batch_size=7", "--results", path)
    golden(out.splitlines()[-1])


def test_where_a_run_was_is_the_gpu_that_is_meant(run: Run, tmp_path: Path) -> None:
    """Also one of which nothing is stored: its launches brought the rates of its chip."""
    path = results(tmp_path / "perf.json", ROWS[0], kind="nvidia-h300")
    code, out, _ = run("expect", ROWS[0], "--results", path, "--json")
    assert (code, json.loads(out)["machine"], json.loads(out)["nearest"]["machine"]) == (0, "nvidia-h300", H200)


def test_what_cannot_be_told_is_refused_in_a_line(run: Run, tmp_path: Path, golden: Golden) -> None:
    path = results(tmp_path / "perf.json", *ROWS[1:])
    asked: list[list[object]] = [
        ["model=llama-3.2-1b", "gpu=foo"],
        ["model=llama-3.2-1b", "--machine", "foo"],
        ["model=llama-3.2-1b", "micro_batch_size=7", "--results", path],
        ["model=llama-tiny"],
        ["model=mixtral-like-0.6b"],
        ["command=python train.py"],
    ]
    lines = []
    for words in asked:
        code, out, err = run("expect", *words)
        assert (code, out) == (1, "")
        lines.append(err.replace(str(tmp_path), "TMP"))
    golden("".join(lines))


def test_two_cases_are_no_question(run: Run) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("expect", ROWS[0], ROWS[1])


def test_a_gpu_that_is_named_twice_is_refused(run: Run) -> None:
    """Of two names one would count, and a kind that nobody knows be ignored."""
    with pytest.raises(SystemExit, match="2"):
        run("expect", ROWS[0], "gpu=h200", "--machine", "h1000")


def test_launches_on_a_cpu_say_nothing_of_a_gpu(run: Run, tmp_path: Path, golden: Golden) -> None:
    spec = TrainSpec(model="llama-tiny")
    case = CaseResult(
        id=spec.id, digest=spec.digest, nodeid="", machine="cpu", verdict="new", reason="", launches=(launch_of(spec),)
    )
    write_json(tmp_path / "r.json", document({"kind": "cpu"}, [case]))
    code, _, err = run("expect", ROWS[0], "gpu=h200", "--results", str(tmp_path / "r.json"))
    assert code != 0
    golden(err.replace(str(tmp_path), "TMP"))


def test_where_nothing_is_stored_the_next_step_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    code, _, error = llmperf_on(tmp_path, capsys)("expect", "model=llama-tiny", "gpu=h100")
    assert code == 1
    golden(error)
