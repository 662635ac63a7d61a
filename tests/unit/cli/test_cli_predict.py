"""``llmperf predict``, ``report --purpose``, and ``report --tables`` of several GPUs."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_llmperf.insight import chapter15
from pytest_llmperf.spec.same_training import training_of
from tests.shelf import Run, baseline_at, keep, llmperf_on

LLAMA, OPT = chapter15.LLAMA_WIDTHS[0].spec, chapter15.OPT_WIDTHS[0].spec
# Of an H200 host, and of MareNostrum 5 (tables 15.10 to 15.12).
MEASURED = {1: 72_271.0, 2: 70_114.0, 4: 69_707.0, 8: 69_250.0}
POINTS = ",".join(f"{gpus}:{rate:.0f}" for gpus, rate in MEASURED.items())
CHAPTERS = "1:48229,2:46188,4:43432,8:42297,16:41869,32:41424"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for gpus, rate in MEASURED.items():
        keep(tmp_path, baseline_at(replace(LLAMA, gpus=gpus), rate, watts=600.0 * gpus))
    return tmp_path


@pytest.fixture
def llmperf(capsys: pytest.CaptureFixture[str], root: Path) -> Run:
    return llmperf_on(root, capsys)


def rows_of(out: str) -> list[dict[str, str]]:
    return list(csv.DictReader(out.splitlines()))


class TestPredict:
    def test_stored_widths(self, llmperf: Run) -> None:
        code, out, err = llmperf("predict", "--gpus", "16,1024")
        assert (code, err) == (0, "")
        assert out.startswith("llama-3.2-1b-bf16-sdpa-liger-mbs37 on m: fitted to 1, 2, 4, 8 GPUs\n")
        lines = [line.split() for line in out.splitlines()]
        assert [line[0] for line in lines[2:8]] == ["1", "2", "4", "8", "16", "1024"]
        assert lines[2][-2] == "%" or lines[2][-3] == "72,271"
        assert "2.00 GB in 77 buckets" in out
        assert "between nodes nothing was measured" in out

    def test_a_document(self, llmperf: Run) -> None:
        code, out, _ = llmperf("predict", "--gpus", 16, "--fit-up-to", 4, "--json")
        found = json.loads(out)
        assert code == 0
        assert found["fitted_to"] == {
            "1": pytest.approx(72_271),
            "2": pytest.approx(70_114),
            "4": pytest.approx(69_707),
        }
        held_back = next(row for row in found["predictions"] if row["gpus"] == 8)
        assert held_back["measured"] == pytest.approx(69_250)
        assert abs(held_back["error"]) < 0.02
        for row in found["predictions"]:
            assert row["low"] < row["tokens_per_second_per_gpu"] < row["high"]
        assert not found["coefficients"]["inter_node_bandwidth"]["learned"]

    def test_given_points_say_what_they_are_assumed_to_be(self, llmperf: Run) -> None:
        arguments = ("--gpus", "32", "--points", CHAPTERS, "--fit-up-to", 8, "--gpus-per-node", 4, "--format", "csv")
        code, out, _ = llmperf("predict", *arguments)
        last = rows_of(out)[-1]
        assert code == 0
        assert (last["gpus"], last["nodes"], last["measured"]) == ("32", "8", "41424")
        assert float(last["error"]) == pytest.approx(-0.016, abs=0.002)
        out = llmperf("predict", "--gpus", 2, "--points", POINTS)[1]
        assert out.startswith("given points of (assumed) llama-3.2-1b-bf16-sdpa-liger-mbs37: fitted to")
        out = llmperf("predict", "model=opt-1.3b", "--gpus", 2, "--points", POINTS, "--format", "markdown")[1]
        assert out.startswith("## given points of opt-1.3b-bf16-sdpa-mbs1: fitted to")

    def test_a_sisters_network_serves_one_width(self, llmperf: Run, root: Path) -> None:
        keep(root, baseline_at(OPT, 57_000.0))
        code, out, err = llmperf("predict", OPT.id, "--gpus", 8, "--network-from", LLAMA.id)
        assert (code, err) == (0, "")
        assert "the network is as llama-3.2-1b-bf16-sdpa-liger-mbs37 met it at 1, 2, 4, 8 GPUs" in out
        code, out, err = llmperf("predict", OPT.id, "--gpus", 8)
        assert (code, out) == (1, "")
        assert "1 number(s) of GPUs to fit, expected 2 at least" in err
        assert err.count("\n") == 1

    def test_of_several_series_one_has_to_be_named(self, llmperf: Run, root: Path) -> None:
        for gpus in (1, 2):
            keep(root, baseline_at(replace(OPT, gpus=gpus), 57_000.0))
        code, _, err = llmperf("predict", "--gpus", 8)
        assert code == 1
        assert f"2 trainings are stored of several numbers of GPUs, expected one: {LLAMA.id}, {OPT.id}" in err
        assert llmperf("predict", "--gpus", 8, replace(OPT, gpus=2).id)[0] == 0

    def test_two_cases_are_one_too_many(self, llmperf: Run) -> None:
        code, _, err = llmperf("predict", "--gpus", 8, LLAMA.id, replace(LLAMA, gpus=2).id)
        assert (code, err) == (1, "llmperf: 2 cases are named, expected one\n")

    def test_nothing_of_it_stored(self, llmperf: Run) -> None:
        code, _, err = llmperf("predict", "--gpus", 8, "model=opt-1.3b")
        assert code == 1
        assert "no baseline of this training" in err

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--gpus", "0"], "'0': expected numbers of GPUs"),
            (["--gpus", "2,x"], "'x': expected numbers of GPUs"),
            (["--gpus", "1e9"], "'1e9': expected numbers of GPUs"),
            (["--gpus", "10000000"], "1 to 1,000,000"),
            (["--gpus", "2", "--points", "1"], "'1': expected GPUS:TOKENS_PER_SECOND_PER_GPU"),
            (["--gpus", "2", "--points", "1:-3"], "expected GPUS:TOKENS"),
            (["--gpus", "2", "--points", "1:3,1:4"], "1 GPUs are given twice"),
            (["--gpus", "2", "--points", "1:nan"], "expected GPUS:TOKENS"),
            (["--gpus", "2", "--gpus-per-node", "0"], "'0': expected a number of GPUs"),
            (["--gpus", "2", "--algorithm", "star"], "invalid choice"),
            ([], "required: --gpus"),
        ],
    )
    def test_usage(self, llmperf: Run, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
        with pytest.raises(SystemExit) as ended:
            llmperf("predict", *arguments)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


class TestPurpose:
    def test_a_deadline_by_hand(self, llmperf: Run) -> None:
        # 10e9 tokens at 140,228 tokens/s are 19.8 h of 2 GPUs.
        arguments = ("--purpose", "deadline", "--tokens", "10B", "--price", 2.1, "--deadline", "1d")
        code, out, err = llmperf("report", *arguments, "--format", "csv")
        rows = {int(row["gpus"]): row for row in rows_of(out)}
        assert (code, err) == (0, "")
        assert float(rows[2]["hours"]) == pytest.approx(19.81, abs=0.01)
        assert float(rows[2]["cost"]) == pytest.approx(83.20, abs=0.02)
        assert float(rows[2]["cost_efficiency"]) == pytest.approx(70_114 / 72_271, rel=1e-4)
        assert float(rows[2]["joules_per_token"]) == pytest.approx(1200 / 140_228, rel=1e-4)
        assert float(rows[1]["kilowatt_hours"]) == pytest.approx(600 / 72_271 * 1e10 / 3.6e6, rel=1e-4)
        assert [rows[gpus]["choice"] for gpus in (1, 2, 4, 8)] == ["too late", "tie", "best", "-"]
        out = llmperf("report", *arguments)[1]
        assert "llama-3.2-1b-bf16-sdpa-liger-mbs37-gpus4 (4 GPUs): 10.0 h, 83.68 EUR" in out
        assert "a tie within 1 %, decided by time: llama-3.2-1b-bf16-sdpa-liger-mbs37-gpus2 (2 GPUs)" in out

    @pytest.mark.parametrize(
        ("limits", "said"),
        [
            (("--deadline", "1h"), "impossible: the fastest, given points (8 GPUs), takes 5.0 h"),
            (("--budget", "3"), "impossible: the cheapest, given points (1 GPU), costs 38.44 GPU-hours"),
            (
                ("--deadline", "6h", "--budget", "39"),
                "in time the cheapest is given points (8 GPUs) for 40.11 GPU-hours",
            ),
        ],
    )
    def test_the_impossible_is_said(self, llmperf: Run, limits: tuple[str, ...], said: str) -> None:
        arguments = ("--purpose", "fastest", "--tokens", "10B", "--points", POINTS, *limits)
        for form in ("text", "markdown"):
            code, out, err = llmperf("report", *arguments, "--format", form)
            assert (code, err) == (1, "llmperf: given points: nothing serves the purpose\n")
            assert said in out

    def test_each_model_has_an_answer(self, llmperf: Run, root: Path) -> None:
        keep(root, baseline_at(OPT, 57_000.0))
        out = llmperf("report", "--purpose", "fastest", "--tokens", "1e9")[1]
        assert out.count("fastest: 1G tokens, ") == 2
        assert "fastest" not in llmperf("report", "--purpose", "cheapest", "--tokens", 9, "--model", OPT.model)[1]
        code, _, err = llmperf("report", "--purpose", "fastest", "--tokens", "9", "--model", "gpt")
        assert (code, err.count("\n")) == (1, 1)
        assert "gpt: no training is stored, expected one of llama-3.2-1b, opt-1.3b" in err

    def test_what_trains_otherwise_is_no_choice(self, llmperf: Run, root: Path) -> None:
        fused = replace(LLAMA, optimizer="adamw_torch_fused")
        for spec, rate in ((replace(LLAMA, optimizer="sgd"), 80_000.0), (replace(LLAMA, fp8="tensorwise"), 90_000.0)):
            keep(root, baseline_at(spec, rate))
        keep(root, baseline_at(fused, 75_000.0))
        ask = ("report", "--purpose", "cheapest", "--tokens", "10B")
        code, out, err = llmperf(*ask)
        assert (code, err) == (0, "")
        lines = out.splitlines()[1:5]
        assert lines[0].startswith("bf16, fp8 tensorwise, adamw_torch, 1024 tokens: llama-3.2-1b-bf16-fp8-tensorwise-")
        assert lines[1].startswith("bf16, sgd, 1024 tokens: llama-3.2-1b-bf16-sdpa-liger-sgd-")
        assert lines[2].startswith(f"bf16, adamw_torch, 1024 tokens: {fused.id} (1 GPU): ")
        assert "another precision, optimizer or length may learn otherwise" in lines[3]
        rows = rows_of(llmperf(*ask, "--format", "csv")[1])
        assert sorted(row["training"] for row in rows if row["choice"] == "best") == [
            "bf16, adamw_torch, 1024 tokens",
            "bf16, fp8 tensorwise, adamw_torch, 1024 tokens",
            "bf16, sgd, 1024 tokens",
        ]

    def test_one_training_can_be_asked_for(self, llmperf: Run, root: Path) -> None:
        for spec in (replace(LLAMA, optimizer="sgd"), OPT):
            keep(root, baseline_at(spec, 80_000.0))
        ask = ("report", "--purpose", "cheapest", "--tokens", "10B")
        code, out, err = llmperf(*ask, "--like", replace(LLAMA, gpus=4).id)
        assert (code, err) == (0, "")
        assert out.splitlines()[1].startswith(f"{LLAMA.id} (1 GPU): ")
        assert "sgd" not in out
        assert "opt-1.3b" not in out
        code, out, err = llmperf(*ask, "--like", "nothing-of-the-kind")
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert llmperf(*ask, "--like", LLAMA.id, "--points", POINTS)[0] == 1

    def test_a_training_that_nobody_stored_is_one_line(self, llmperf: Run, root: Path) -> None:
        for path in root.rglob("*.json"):
            path.unlink()
        keep(root, baseline_at(replace(LLAMA, optimizer="sgd"), 80_000.0))
        ask = ("report", "--purpose", "cheapest", "--tokens", "10B", "--like", f"model={LLAMA.model}")
        code, out, err = llmperf(*ask)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert "nothing that is stored trains like it (bf16, adamw_torch, 1024 tokens), but: bf16, sgd, 1024 tok" in err

    @pytest.mark.parametrize(
        ("one", "other", "same"),
        [
            ("adamw_torch", "adamw_torch_fused", True),
            ("adamw_torch", "paged_adamw_32bit", True),
            ("adamw_bnb_8bit", "paged_adamw_8bit", True),
            ("adamw_torch", "adamw_8bit", False),
            ("adamw_torch", "sgd", False),
        ],
    )
    def test_optimizers_of_one_arithmetic_train_alike(self, one: str, other: str, same: bool) -> None:
        trainings = {training_of(replace(LLAMA, optimizer=name)) for name in (one, other)}
        assert len(trainings) == (1 if same else 2)

    def test_a_purpose_is_served_if_one_training_does(self, llmperf: Run, root: Path) -> None:
        slow = replace(LLAMA, model_precision="fp32", mixed_precision="no")
        keep(root, baseline_at(slow, 5_000.0))
        code, out, err = llmperf("report", "--purpose", "deadline", "--tokens", "10B", "--deadline", "2d")
        assert (code, err) == (0, "")
        assert f"fp32, adamw_torch, 1024 tokens: impossible: the fastest, {slow.id} (1 GPU), takes 555.6 h" in out

    def test_two_machines_have_two_prices(self, llmperf: Run, root: Path) -> None:
        keep(root, baseline_at(LLAMA, 1000.0, machine="n"))
        code, _, err = llmperf("report", "--purpose", "fastest", "--tokens", "9")
        assert code == 1
        assert "choose with --machine: m, n" in err

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["fastest"], "--purpose fastest needs --tokens"),
            (["deadline", "--tokens", "9"], "--purpose deadline needs --deadline, e.g. --deadline 24h"),
            (["budget", "--tokens", "9"], "--purpose budget needs --budget, e.g. --budget 1000"),
        ],
    )
    def test_a_purpose_says_what_it_needs(self, llmperf: Run, arguments: list[str], said: str) -> None:
        code, out, err = llmperf("report", "--purpose", *arguments)
        assert (code, out) == (1, "")
        assert said in err

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--purpose", "fastest", "--tokens", "many"], "'many': expected a number of tokens"),
            (["--purpose", "fastest", "--tokens", "9", "--price", "0"], "'0': expected a number above 0"),
            (["--purpose", "deadline", "--tokens", "9", "--deadline", "1y"], "'1y': expected a"),
            (["--purpose", "fastest", "--tokens", "9", "--currency", "E\nR"], r"'E\nR': expected a currency, e.g. EUR"),
            (["--purpose", "fastest", "--tokens", "9", "--samples", "3"], "--samples says nothing to --purpose"),
            (["--tables", "--tokens", "9"], "--tokens says nothing to --tables"),
            (["--tables", "--purpose", "fastest"], "not allowed with argument"),
        ],
    )
    def test_usage(self, llmperf: Run, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
        with pytest.raises(SystemExit) as ended:
            llmperf("report", *arguments)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err

    @pytest.mark.parametrize(("text", "hours"), [("36", 36.0), ("2d", 48.0), ("1d12h", 36.0), ("90m", 1.5)])
    def test_times(self, llmperf: Run, text: str, hours: float) -> None:
        out = llmperf("report", "--purpose", "deadline", "--tokens", "9", "--deadline", text)[1]
        assert f"within {hours:,.1f} h" in out


class TestTables:
    def test_ours_stands_beside_the_published(self, llmperf: Run) -> None:
        code, out, err = llmperf("report", "--tables")
        lines = [" ".join(line.split()) for line in out.splitlines()]
        assert (code, err) == (0, "")
        assert "8 296 69,250 42,297 1.0 GiB 62.1 GiB" in lines
        assert "8 69,250 42,297 554,000 338,376 7.67 7.02 95.8 % 87.7 %" in lines
        assert "32 - 41,424 - 1,325,568 - 27.48 - 85.9 %" in lines
        assert "2 140,228 92,376 97.0 % 95.8 % 0.97 0.96" in lines

    def test_documents(self, llmperf: Run) -> None:
        out = llmperf("report", "--tables", "--format", "markdown")[1]
        assert out.count("#### 15.1") == 3
        rows = rows_of(llmperf("report", "--tables", "--format", "csv")[1])
        eight = next(row for row in rows if row["gpus"] == "8")
        assert float(eight["speed_up_over_one_gpu"]) == pytest.approx(8 * 69_250 / 72_271, rel=1e-4)
        assert float(eight["published_cost_efficiency"]) == pytest.approx(42_297 / 48_229, rel=1e-4)
        assert eight["parallelism"] == "ddp"
        assert rows[0]["table"] == "15.1"
        assert rows[0]["efficiency"] == rows[0]["parallelism"] == ""

    def test_widths_alone_are_tables_too(self, llmperf: Run, root: Path) -> None:
        keep(root, baseline_at(replace(OPT, gpus=2), 57_000.0, machine="n"))
        code, out, _ = llmperf("report", "--tables", "--machine", "n")
        assert code == 0
        assert "15.9" not in out
        assert "2 57,000 - 114,000 - - - - -" in [" ".join(line.split()) for line in out.splitlines()]

    def test_one_gpu_is_no_scaling(self, llmperf: Run, root: Path) -> None:
        keep(root, baseline_at(LLAMA, 1000.0, machine="n"))
        assert "15.11" not in llmperf("report", "--tables", "--machine", "n")[1]
