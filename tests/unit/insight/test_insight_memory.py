"""Specs on the command line, and what ``llmperf plan`` says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.analysis.formulas import MemoryPlan, caveats, newest_on_a_gpu
from pytest_llmperf.cli import answer, main
from pytest_llmperf.cli.answer import CaseError, Screen
from pytest_llmperf.cli.asked_run import Named, named
from pytest_llmperf.cli.commands.plan import Prediction, document, page, predictions
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.store import parse, text_of
from pytest_llmperf.launch import prediction as prediction_module
from pytest_llmperf.launch.prediction import PredictionError
from tests.fakes import Fake, launch_of
from tests.golden import Golden

BASELINES = Path(__file__).parents[3] / "baselines"
STORED = "llama-3.2-1b-bf16-sdpa-liger-mbs37-gpus1"
MACHINE = "nvidia-h200-140gib"
GIB = 2**30
PLAN = MemoryPlan({"weights": GIB, "activations": 2 * GIB, "workspace": 2**26, "gradients": 0})


def stored_peak() -> int:
    """Of the newest launch, by the file itself."""
    path = next((BASELINES / MACHINE).rglob(f"{STORED}.json"))
    launches = json.loads(path.read_text(encoding="utf-8"))["launches"]
    newest = max(launches, key=lambda launch: str(launch["started_at"]))
    return max(int(rank["peak_allocated_bytes"]) for rank in newest["ranks"])


def test_a_spec_in_pairs_and_one_by_its_id() -> None:
    words = ["model=llama-3.2-1b", "liger=true", "micro_batch_size=37", STORED]
    by_id, in_pairs = named(words, BASELINES, MACHINE)
    assert in_pairs.spec.digest == by_id.spec.digest == "e8eccc4c06e1f771"
    assert in_pairs.stored is None
    assert by_id.stored is not None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model=llama-3.2-1b", "liger=yes"], "liger=yes: expected true or false"),
        (["model=llama-3.2-1b", "liger=ture"], "did you mean 'true'?"),
        (["model=llama-3.2-1b", "gpus=two"], "gpus=two: expected a whole number"),
        (["model=llama-3.2-1b", "gpus="], "gpus=: expected a whole number"),
        (["model=llama-3.2-1b", "gpus=0"], "gpus=0 must be at least 1"),
        (["model=llama-3.2-1b", "gpus=1", "gpus=2"], "gpus= is given twice"),
        (["model=llama-3.2-1b", "lieger=true"], "has no field 'lieger' (did you mean 'liger'?)"),
        (["model=llama-3.2-1b", "=true"], "has no field ''"),
        (["model=llama-3.2-1b", "attention=flash"], "unknown attention 'flash'"),
        (["model=llama-tiny", "sequence_length=4096"], "exceeds the model's 2048 positions"),
        (["model=llama-tiny", "attention=flash_attention_2", "mixed_precision=no", "model_precision=fp32"], "no fp32"),
        (["model=none/such.json"], "no such file"),
        (["liger=true"], "needs a model"),
        (["model=lama-3.2-1b"], "did you mean 'llama-3.2-1b'?"),
        (["no-such-id"], "no such case"),
    ],
    ids=" ".join,
)
def test_what_names_no_spec_is_one_line(words: list[str], said: str) -> None:
    with pytest.raises(CaseError) as caught:
        named(words, BASELINES, None)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, []),
        ({"torch_compile": True}, ["torch_compile is not modelled"]),
        ({"attention": "flash_attention_2"}, ["flash_attention_2 is counted as any fused attention"]),
        ({"attention": "flex_attention", "gpus": 2}, ["flex_attention is counted", "of several GPUs only DDP's"]),
        ({"model_precision": "fp16", "mixed_precision": "no"}, ["fp16 is counted as bf16"]),
        (
            {"gpus": 4, "parallelism": "fsdp_hybrid", "mixed_precision": "no"},
            ["of several GPUs only FSDP's buffers", "fsdp_hybrid is counted on one node"],
        ),
        ({"gpus": 2, "parallelism": "zero3", "model_precision": "fp32"}, ["of several GPUs only DeepSpeed's"]),
    ],
    ids=str,
)
def test_what_is_not_modelled_is_said(values: dict[str, Any], said: list[str]) -> None:
    found = caveats(TrainSpec(model="llama-tiny", **values))
    assert len(found) == len(said)
    assert all(line.startswith(start) for line, start in zip(found, said, strict=True))


@pytest.mark.parametrize("package", ["liger_kernel", "peft", "deepspeed"])
def test_what_is_not_installed_is_said_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, golden: Golden, package: str
) -> None:
    monkeypatch.setattr(prediction_module, "find_spec", lambda name: None if name == package else name)
    plain = TrainSpec(model="llama-tiny", liger=False)
    sharded = replace(plain, gpus=2, parallelism="zero2", model_precision="fp32")
    specs = [replace(plain, liger=True), replace(plain, lora=True), sharded]
    golden(prediction_module.why_none(spec) for spec in specs)


def test_a_family_that_was_never_measured_is_said(tmp_path: Path, golden: Golden) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "mamba", "vocab_size": 100}), encoding="utf-8")
    (line,) = caveats(TrainSpec(model=str(path)))
    golden(line)


def prediction(**evidence: Any) -> Prediction:
    spec = TrainSpec(model="opt-1.3b")
    launch = launch_of(spec, Fake(reserved_bytes=3 * GIB, evidence={"device_type": "cuda", **evidence}))
    return Prediction(spec, PLAN, "m", newest_on_a_gpu([launch]))


class TestPage:
    def test_it_adds_up_and_leaves_out_what_is_not_there(self) -> None:
        lines = page(Prediction(TrainSpec(model="opt-1.3b"), PLAN))
        assert PLAN.peak_allocated_bytes == 3 * GIB + 2**26
        assert lines[1].split()[2:4] == ["3.06", "GiB"]
        assert not any("gradients" in line or "measured" in line for line in lines)
        assert "".join(lines).isascii()

    def test_a_stored_case_is_held_against_its_newest_launch(self, golden: Golden) -> None:
        (line,) = [line for line in page(prediction()) if line.startswith("  measured")]
        assert line.split(maxsplit=3) == ["measured", "3.00", "GiB", line.split(maxsplit=3)[3]]
        golden(line)
        assert document(prediction())["measured_peak_allocated_bytes"] == 3 * GIB
        assert document(prediction())["error"] == pytest.approx(2**26 / (3 * GIB))

    def test_what_the_cpu_took_is_no_gpus_memory(self, golden: Golden) -> None:
        on_the_cpu = prediction(device_type="cpu")
        golden.lines(page(on_the_cpu), "on m is")
        assert document(on_the_cpu)["measured_peak_allocated_bytes"] is None

    def test_the_newest_launch_is_by_its_date(self) -> None:
        older, newer = (
            replace(launch_of(TrainSpec(model="opt-1.3b"), Fake(evidence={"device_type": "cuda"})), started_at=day)
            for day in ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z")
        )
        assert newest_on_a_gpu([newer, older]) is newer
        assert newest_on_a_gpu([]) is None


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """``llmperf plan`` of the stored cases, where whatever OPT needs is not known."""

    def predictions(specs: Sequence[TrainSpec]) -> Iterator[Mapping[str, int] | PredictionError]:
        for spec in specs:
            if spec.model == "opt-1.3b":
                yield PredictionError(f"{spec.id}: its memory cannot be predicted: it is not")
            else:
                yield PLAN.parts

    def called(*words: str) -> tuple[int, str, str]:
        code = main(["plan", "--perf-baselines", str(BASELINES), *words])
        return code, *capsys.readouterr()

    monkeypatch.setattr(prediction_module, "predictions", predictions)
    return called


class TestCommand:
    def test_json_is_a_line_a_case_at_any_width(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(answer, "_screen", lambda: Screen(20))
        code, out, err = run(STORED, "model=llama-tiny", "--json", "--machine", MACHINE)
        one, other = map(json.loads, out.splitlines())
        assert (code, err) == (0, "")
        assert one["measured_peak_allocated_bytes"] == stored_peak()
        assert one["machine"] == MACHINE
        assert (other["measured_peak_allocated_bytes"], other["machine"], other["notes"]) == (None, None, [])

    def test_what_can_be_predicted_is_told_and_what_cannot_is_named(self, run: Run, golden: Golden) -> None:
        code, out, err = run("opt-1.3b-bf16-sdpa-mbs6-gpus1", STORED, "--machine", MACHINE)
        assert (code, out.splitlines()[0]) == (1, STORED)
        golden(err)

    def test_every_stored_case_as_a_table(self, run: Run) -> None:
        code, out, err = run("--stored", "--machine", "nvidia-h200-140gib", "--format", "markdown")
        rows = out.splitlines()
        assert code == 1
        assert len(rows) - 2 + len(err.splitlines()) == len(list((BASELINES / "nvidia-h200-140gib").glob("*/*.json")))
        (row,) = [row for row in rows if STORED in row]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1:3] == ["3.06 GiB", f"{stored_peak() / GIB:.2f} GiB"]
        assert cells[4] == "nvidia-h200-140gib"

    def test_a_table_for_a_terminal(self, run: Run) -> None:
        lines = run("model=llama-tiny", "--format", "text")[1].splitlines()
        assert lines[1].split() == ["llama-tiny-bf16-sdpa-mbs1-gpus1", "3.06", "GiB", "-", "-", "-"]

    @pytest.mark.parametrize("words", [[], ["--stored", STORED], [STORED, "--json", "--format", "markdown"]], ids=str)
    def test_usage(self, run: Run, words: list[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            run(*words)
        assert ended.value.code == 2

    @pytest.mark.parametrize("words", [["model=llama-tiny"], [STORED], ["--stored"]], ids=str)
    def test_an_unknown_machine_is_refused_in_a_line(self, run: Run, words: list[str], golden: Golden) -> None:
        code, _, err = run(*words, "--machine", "foo")
        assert code == 1
        golden(err)

    def test_stored_settings_of_another_day_are_named(self, run: Run, tmp_path: Path, golden: Golden) -> None:
        source = next((BASELINES / MACHINE).rglob(f"{STORED}.json"))
        baseline = parse(Baseline, source.read_text(encoding="utf-8"), str(source))
        path = tmp_path / "m" / "llama" / source.name
        path.parent.mkdir(parents=True)
        old = replace(baseline, machine="m", spec={**baseline.spec, "flash": True})
        path.write_text(text_of(old), encoding="utf-8")
        for words in (["--stored"], [STORED]):
            code, out, err = run(*words, "--perf-baselines", str(tmp_path))
            assert (code, out) == (1, "")
            golden(err)
            assert err.count("\n") == 1


def test_predictions_come_in_their_order_each_as_soon_as_it_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, golden: Golden
) -> None:
    estimator = f"""
import json, pathlib, time
def tell(number):
    print(json.dumps({{"number": number, "parts": {{"weights": number + 1}}}}), flush=True)
print("a library's own word", flush=True)
tell(1), tell(0)
deadline = time.monotonic() + 60
while not pathlib.Path({str(tmp_path / "read")!r}).exists() and time.monotonic() < deadline:
    time.sleep(0.01)
tell(2)
"""

    def started(errors: Any, _niceness: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", estimator]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True)

    monkeypatch.setattr(prediction_module, "started", started)
    troubles = list[str]()
    found = predictions(
        [Named(TrainSpec(model="llama-tiny", micro_batch_size=size)) for size in (1, 2, 3, 4)], troubles
    )
    first = next(found)
    (tmp_path / "read").touch()
    assert [one.plan.peak_allocated_bytes for one in (first, *found)] == [1, 2, 3]
    (unknown,) = troubles
    golden(unknown)
