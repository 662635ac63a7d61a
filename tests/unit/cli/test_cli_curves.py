"""Loss curves among baselines: what ``llmperf baselines`` and a night's ``merge`` say of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.cli import main
from pytest_llmperf.cli.night_results import unused
from pytest_llmperf.judge.baseline import LOSS_CURVES, BaselineStore, CurveBaseline, SeedCurve
from pytest_llmperf.judge.store import Store
from pytest_llmperf.records.results_document import document_of
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.golden import Golden
from tests.shelf import baseline_at

SPEC = TrainSpec(model="llama-tiny", data="text", sequence_length=64, steps=32, min_steps=32)
OTHER = replace(SPEC, micro_batch_size=2)

Told = Callable[..., tuple[int, str, str]]


@pytest.fixture
def told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Told:
    def told(*words: str) -> tuple[int, str, str]:
        code = main(["baselines", *words, "--perf-baselines", str(tmp_path)])
        return code, *capsys.readouterr()

    return told


def curves(root: Path, spec: TrainSpec = SPEC, *, on_cpu: bool = True) -> Path:
    new = CurveBaseline(
        id=spec.id,
        digest=spec.digest,
        spec=spec.to_dict(),
        recorded_by="t.py::t",
        recorded_at="2026-11-23T00:00:00Z",
        curves=tuple(SeedCurve(seed=seed, losses=(6.0 + seed / 100,) * 32) for seed in (42, 43, 44)),
        device="a CPU",
        on_cpu=on_cpu,
    )
    store = Store(root, CurveBaseline)
    store.check_writable(LOSS_CURVES, spec)
    return store.replace(spec, None, new)


def figures(root: Path, spec: TrainSpec = SPEC) -> None:
    BaselineStore(root).update("m", spec, lambda _: baseline_at(spec, 1000.0))


def test_a_list_has_them_with_and_without_other_baselines(told: Told, tmp_path: Path) -> None:
    curves(tmp_path)
    code, alone, _ = told("list")
    assert code == 0
    assert f"{SPEC.id}      3     32  a CPU" in " ".join(alone.splitlines())
    figures(tmp_path)
    code, both, _ = told("list")
    assert (code, both.endswith(alone), "1,000" in both) == (0, True, True)
    assert "loss curves" not in told("list", "--machine", "m")[1], "they are of no machine kind"


@pytest.mark.parametrize("by_digest", [False, True])
def test_a_case_is_shown_with_its_loss_curves(told: Told, tmp_path: Path, by_digest: bool) -> None:
    curves(tmp_path)
    curves(tmp_path, OTHER)
    case = SPEC.digest[:8] if by_digest else SPEC.id
    code, alone, _ = told("show", case)
    assert code == 0
    assert alone.count("3 seeds (42, 43, 44) of 32 steps") == 1
    figures(tmp_path)
    code, both, _ = told("show", case)
    assert (code, both.endswith(alone), "launches" in both) == (0, True, True)


def test_what_nobody_stored_is_still_told(told: Told, tmp_path: Path) -> None:
    assert "no baselines here" in told("list")[2]
    curves(tmp_path)
    figures(tmp_path)
    code, _, err = told("show", OTHER.id)
    assert (code, "no such case" in err) == (1, True)


def test_a_damaged_file_is_a_line_beside_what_can_be_read(told: Told, tmp_path: Path, golden: Golden) -> None:
    curves(tmp_path, OTHER)
    curves(tmp_path).write_text("{")
    for words in (("list",), ("show", SPEC.id)):
        code, out, err = told(*words)
        assert (code, OTHER.id in out) == (1, words == ("list",))
        (line,) = err.splitlines()
        golden(line)


def test_what_they_do_not_have_is_said_in_a_line(told: Told, tmp_path: Path, golden: Golden) -> None:
    figures(tmp_path)
    code, _, err = told("diff", SPEC.id, str(curves(tmp_path)))
    assert code == 1
    golden(err)
    assert "llmperf baselines show" in err


@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_night_names_those_that_no_case_has(tmp_path: Path, on_cpu: bool) -> None:
    root = tmp_path / "baselines"
    kept, gone = curves(root, on_cpu=on_cpu), curves(root, OTHER, on_cpu=on_cpu)
    curves(root, replace(SPEC, micro_batch_size=3), on_cpu=not on_cpu)  # none that this night could have
    figures(root)
    (tmp_path / "t.py").touch()
    coverage = {"nodes": ["t.py::t"], "parts": [], "gaps": [], "said": {"t.py::t": "all"}}
    suite = {
        "baselines": str(root),
        "rootdir": str(tmp_path),
        "digests": [SPEC.digest],
        "coverage": coverage,
        "strict": False,
    }
    machine = {"kind": "m", "gpus": [] if on_cpu else [{"name": "one"}]}
    night: list[dict[str, Any]] = [
        {"machine": machine, "suite": {**suite, "perf_width": width, "stopped": False}} for width in (None, 1)
    ]
    lines, doubts = unused([document_of(each) for each in night])
    assert doubts == []
    assert [str(gone) in line for line in lines] == [True]
    assert not [line for line in lines if str(kept) in line]
