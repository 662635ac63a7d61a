"""`llmperf script`, and a script as the spec of `check` and `bisect`: what is named, what is refused, what is shown."""

from __future__ import annotations

import json
import os
from itertools import starmap
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.cli import main
from pytest_llmperf.cli.answer import CaseError
from pytest_llmperf.cli.asked_run import as_pairs, named
from pytest_llmperf.settings.spec import ScriptSpec
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.redaction import is_secret
from tests.fakes import install
from tests.golden import Golden


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMPERF_LEASE_DIR", str(tmp_path / "leases"))
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    Path(".git").mkdir()
    install()
    yield
    mock.patch.stopall()


def script(*words: str) -> int:
    return main(["script", "--gpus", "0", *words])


@pytest.mark.usefixtures("here")
def test_two_launches_show_what_would_be_held_and_the_test_that_holds_it(
    capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    trace = {"operator": {"aten::mm": 20}, "copy": {"aten::copy_": 3}}
    Path("fake.json").write_text(json.dumps({"trace": trace}))
    assert script("--steps", "20", "--", "torchrun", "--nproc-per-node", "2", "train.py") == 0
    golden(capsys.readouterr().out)
    assert not Path("baselines").exists()


@pytest.mark.usefixtures("here")
def test_what_is_not_known_is_said(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    evidence = {"tokens": "unknown", "remarks": ["steps are counted by SGD (24)"]}
    Path("fake.json").write_text(json.dumps({"evidence": evidence}))
    assert script("python train.py") == 0
    golden(capsys.readouterr().out)


@pytest.mark.usefixtures("here")
def test_a_script_that_fails_is_told_by_its_last_lines(capsys: pytest.CaptureFixture[str]) -> None:
    Path("fake.json").write_text(json.dumps({"fail": "error"}))
    assert script("--", "python", "train.py") == 1
    out, error = capsys.readouterr()
    assert not out
    assert "llmperf: train-gpus1: " in error


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--",),
        ("--steps", "3", "--", "python", "train.py"),
        ("--steps", "many", "--", "python", "train.py"),
        ("--workdir", "here", "--", "python", "train.py"),
        ("--cwd", "nowhere", "--", "python", "train.py"),
        ("python 'train.py",),
        ("--", "python", "train.py", "--batch", "{batch}"),
        ("--trace-at", "5", "--", "python", "train.py"),
    ],
)
@pytest.mark.usefixtures("here")
def test_what_cannot_be_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], golden: Golden, words: tuple[str, ...]
) -> None:
    assert script(*words) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    golden(error)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("words", ["--steps 3", "--seed 3", "--cwd 3", "--end 3", "--workdir 3", "--trace-at 0"])
def test_a_run_that_is_watched_is_not_changed(capsys: pytest.CaptureFixture[str], golden: Golden, words: str) -> None:
    assert main(["script", "--observe", *words.split(), "--", "python", "train.py"]) == 1
    golden(capsys.readouterr().err)


@pytest.mark.usefixtures("here")
def test_a_program_that_is_not_there_is_refused_before_anything_is_left(
    capsys: pytest.CaptureFixture[str], golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMPERF_CACHE_DIR", "state")
    assert main(["script", "--observe", "--", "pythn", "train.py"]) == 1
    golden(capsys.readouterr().err)
    assert not Path("state").exists()


@pytest.mark.usefixtures("here")
def test_a_width_fills_the_blank_of_a_command(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    Path("fake.json").write_text("{}")
    words = ["--script", "torchrun --nproc-per-node {gpus} t.py", "gpus=2", "--gpus", "0"]
    assert main(["check", *words]) == 1
    golden.lines(capsys.readouterr().err, "t-gpus2: new")


@pytest.mark.usefixtures("here")
def test_a_script_is_checked_recorded_and_found_by_its_id(capsys: pytest.CaptureFixture[str], golden: Golden) -> None:
    words = ["--script", "python train.py --batch 8", "steps=20", "--gpus", "0"]
    assert main(["check", *words]) == 1
    golden.lines(capsys.readouterr().out, "llmperf check")
    assert main(["check", *words, "--update-baselines=new"]) == 0
    assert main(["check", "train-batch-8-gpus1", "--gpus", "0"]) == 0
    capsys.readouterr()
    assert main(["baselines", "show", "train-batch-8-gpus1"]) == 0
    golden.lines(capsys.readouterr().out, "settings ")
    assert main(["plan", "train-batch-8-gpus1"]) == 1
    golden(capsys.readouterr().err)


@pytest.mark.parametrize(
    "words",
    [
        ("check",),
        ("check", "command=python train.py", "stepps=20"),
        ("check", "command=python train.py", "steps=many"),
        ("check", "command=python train.py", "env=LOUD"),
        ("check", "--script", ""),
        ("bisect", "--good", "a", "--bad", "b"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_spec_that_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], golden: Golden, words: tuple[str, ...]
) -> None:
    assert main([*words]) == 1
    golden(capsys.readouterr().err)


_WORDS = st.text(st.characters(codec="utf-8", exclude_characters=",=\0"), min_size=1)
_VALUES = _WORDS | st.sampled_from(["1,2", "1,B=2", ","])


@given(
    command=st.lists(st.sampled_from(["python", "train.py", "--x=1", "'a b'"]), min_size=1).map(" ".join),
    tokens=st.one_of(st.just("auto"), st.integers(1, 10**9), st.just("sequences:64")),
    seed=st.none() | st.integers(0, 99),
    watch=st.lists(_WORDS, max_size=3),
    # A secret is refused, and a variable may be one by its name alone: Token.
    env=st.dictionaries(_WORDS, _VALUES, max_size=3).filter(lambda env: not any(starmap(is_secret, env.items()))),
    tolerance=st.none() | st.sampled_from([0.01, 0.5]),
)
def test_pairs_name_the_spec_that_they_were_made_of(
    command: str, tokens: str | int, seed: int | None, watch: list[str], env: dict[str, str], tolerance: float | None
) -> None:
    spec = ScriptSpec(command=command, tokens=tokens, seed=seed, watch=watch, env=env, throughput_tolerance=tolerance)
    (found,) = named(as_pairs(spec), Path("none"), None)
    assert found.spec == spec


def test_pairs_name_what_transformers_is_given() -> None:
    spec = TrainSpec(model="llama-tiny", training_arguments={"adam_beta2": 0.95, "max_grad_norm": 0})
    (found,) = named(as_pairs(spec), Path("none"), None)
    assert found.spec == spec
    for words in ('model_kwargs={"num_hidden_layers": 1}', "model_kwargs=num_hidden_layers=1"):
        (written,) = named(["model=llama-tiny", words], Path("none"), None)
        assert written.spec == TrainSpec(model="llama-tiny", model_kwargs={"num_hidden_layers": 1})
    (written,) = named(
        ["model=llama-tiny", "training_arguments=max_grad_norm=0.5,optim_args=a=1,b=c"], Path("none"), None
    )
    assert written.spec == TrainSpec(
        model="llama-tiny", training_arguments={"max_grad_norm": 0.5, "optim_args": "a=1", "b": "c"}
    )


def test_a_comma_that_no_name_follows_is_of_the_variable() -> None:
    (found,) = named(["command=python train.py", "env=A=0,1,B=c"], Path("none"), None)
    assert found.spec.to_dict()["env"] == {"A": "0,1", "B": "c"}


def test_pairs_of_two_kinds_are_refused(golden: Golden) -> None:
    with pytest.raises(CaseError) as error:
        named(["model=llama-tiny"], Path("none"), None, script="python train.py")
    golden(error)


@pytest.mark.usefixtures("here")
def test_a_script_of_the_project_is_named_as_runs_name_it_wherever_its_path_begins() -> None:
    """Else a bisection would launch the working tree's script at each revision."""
    Path("train.py").touch()
    (case,) = named([], Path("baselines"), None, f"python {Path.cwd()}/train.py")
    assert case.spec == ScriptSpec(command="python ./train.py")
