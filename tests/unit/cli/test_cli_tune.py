"""``llmperf tune``: what it refuses before it launches, the test that it writes, and what it prints."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_llmperf.cli.answer import arguments_parser, main
from pytest_llmperf.cli.commands.tune import _space, document, page, winners_test
from pytest_llmperf.judge.objective import OBJECTIVES, Trial, Turns
from pytest_llmperf.launch import machine
from pytest_llmperf.records.result import CaseResult
from pytest_llmperf.run.findings import Concluded
from pytest_llmperf.run.run import Run
from pytest_llmperf.run.tuning.trials import Tried, Tuning
from pytest_llmperf.run.tuning.tuner import Tuner
from pytest_llmperf.settings.space import Space, axes_of
from pytest_llmperf.settings.spec import ScriptSpec
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.fakes import MACHINE
from tests.golden import Golden

TINY = TrainSpec(model="llama-tiny", micro_batch_size=8)
FAST = replace(TINY, micro_batch_size=16, optimizer="adamw_torch_fused")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-model"], "no-such-model"),
        (["llama-tiny", "micro_batch=3"], "no field 'micro_batch' (did you mean 'micro_batch_size'"),
        (["llama-tiny", "8"], "8: expected settings in pairs"),
        (["llama-tiny", "model=opt-tiny"], "model=opt-tiny is given beside llama-tiny"),
        (["llama-tiny", "--objective", "energy"], "no counter tells what a CPU takes; expected a GPU"),
        (["llama-tiny", "--record", "--perf-baselines", "/proc/none"], "baselines cannot be recorded here"),
        (["llama-tiny", "--allow", "fp9"], "'fp9' (did you mean 'fp8'"),
        (["llama-tiny", "--space", "none.toml"], "none.toml: no space could be read (No such file or directory)"),
        (["llama-tiny", "micro_batch_size=4", "--global-batch", "6"], "no multiple of the micro-batch 4"),
        (["llama-tiny", "--global-batch", "6", "micro_batch_size=4"], "no multiple of the micro-batch 4"),
        (["llama-tiny", "--space", "mine.toml", "--global-batch", "6"], "--global-batch is about the usual space"),
        (["llama-tiny", "--space", "mine.toml", "--allow", "fp8"], "--allow is about the usual space"),
        (["llama-tiny", "sequence_length=32", "--sequence-length", "64"], "beside --sequence-length 64, expected one"),
        (["llama-tiny", "gpus=2"], "gpus=2 is given beside --gpus 0"),
        (["llama-tiny", "--space", "near.toml"], "near.toml: attention=sdqa cannot be: TrainSpec: unknown attention"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_line_before_a_launch(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "find_machine", lambda: MACHINE)
    Path("near.toml").write_text("[axes]\nattention = ['sdpa', 'sdqa']\n")
    assert main(["tune", *arguments, "--gpus", "0"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert said in line
    assert not (tmp_path / ".llmperf").exists()


@pytest.mark.parametrize(
    ("command", "axes", "more"),
    [
        ("python train.py --batch {batch} {flags}", "batch = [1]\nflag = ['']", []),
        ("python train.py --batch {batch}", "batch = [1]\nflag = ['']", []),
        ("python train.py --batch {batch}", "batch = []", []),
        ("python train.py --batch {batch}", "batch = 8", []),
        ("python train.py --batch {batch}", "batch = [8, 8]", []),
        ("python train.py --batch {batch}", "batch = ['8']", []),
        ("python train.py --batch {batch}", "batch = [8]\n[start]\nbatch = 4", []),
        ("python train.py --batch {batch}", "batch = [8", []),
        ("python train.py --n {n}", "micro_batch = 'batch'\nn = [8]", []),
        ("python train.py --batch {batch} > log", "batch = [8]", []),
        ("python train.py --batch {batch}", "batch = [8]", ["tokes=64"]),
        ("python train.py --batch {batch}", "batch = [8]", ["--global-batch", "8"]),
        ("python train.py --n {n}", "micro_bach = 'n'\n[axes]\nn = [8]", []),
        ("python train.py --batch {batch}", "batch = [8, [16]]", []),
        ("python train.py --batch {batch}", "batch = [8]\n[start]\nbatch = [8]", []),
        ("python train.py --n {n} {flag}", "[axes.x]\na = { n = 8 }\nb = { n = 8, flag = '--b' }", []),
        ("python train.py {batch}", "[axes.x]\nsmall = 8", []),
        ("python {n} {flag}", "[axes.x]\na = { n = 8 }\nb = { n = 8, flag = '--b' }\n[start]\nflag = '--b'", []),
        ("python train.py --batch {batch}", "batch = [8, '16x']", []),
    ],
)
def test_what_is_wrong_with_a_command_or_its_words_is_said_in_one_line(
    command: str,
    axes: str,
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    golden: Golden,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "find_machine", lambda: MACHINE)
    Path("axes.toml").write_text(axes)
    assert main(["tune", "--script", command, "--axes", "axes.toml", "--gpus", "0", *more]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    golden(err)
    assert not (tmp_path / ".llmperf").exists()


def test_a_text_of_too_few_rows_is_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "find_machine", lambda: MACHINE)
    Path("small.txt").write_text("a few words")
    assert main(["tune", "llama-tiny", "data=text", "text=small.txt", "--gpus", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "0 rows" in line
    Path("small.txt").write_text("a" * 2 * 64)
    Path("s.toml").write_text("[axes]\nmicro_batch_size = [2, 4]")
    words = ["llama-tiny", "data=text", "text=small.txt", "--space", "s.toml"]
    asked = arguments_parser().parse_args(["tune", *words])
    assert _space(asked, tmp_path, 0).size == 2, "where it begins is too large, and another one is not"


def test_a_command_needs_its_axes_and_something_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "find_machine", lambda: MACHINE)
    assert main(["tune", "--script", "python train.py", "--gpus", "0"]) == 1
    golden(capsys.readouterr().err)
    spaces = ["--script", "python train.py {n}", "--axes", "a.toml", "--space", "b.toml"]
    unquoted = ["--script", *"python train.py --batch {batch} --axes a.toml".split()]
    for words in ([], ["llama-tiny", "--script", "python train.py"], spaces, unquoted):
        with pytest.raises(SystemExit):
            main(["tune", "--gpus", "0", *words])
        golden(capsys.readouterr().err.splitlines()[-1])


def test_where_no_gpu_is_seen_and_nobody_asked_for_a_cpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "find_machine", lambda: MACHINE)
    monkeypatch.setattr(Tuner, "run", lambda _: _tuning())
    said = "no GPU is seen"
    assert main(["tune", "llama-tiny"]) == 0
    assert said in capsys.readouterr().err
    assert main(["tune", "llama-tiny", "--gpus", "0"]) == 0
    assert said not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--minutes", "0"], "expected a number of minutes above 0"),
        (["--minutes", "1e9"], "at most 10080 (a week)"),
        (["--objective", "fame"], "invalid choice: 'fame'"),
        (["--memory-limit", "24"], "expected a size of memory with its unit"),
        (["--gpus", "4"], "only 0 GPU(s) visible here"),
    ],
)
def test_an_option_that_is_none_is_a_usage_error(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "find_machine", lambda: MACHINE)
    with pytest.raises(SystemExit) as ended:
        main(["tune", "llama-tiny", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def _tried(spec: TrainSpec, seconds: float, **values: Any) -> Tried:
    figures = {
        "wall_seconds": 4.0,
        "step_seconds": seconds,
        "step_error": 0.002,
        "steps": 9,
        "peak_reserved_bytes": 2**30,
    }
    tokens = spec.sequences_per_step * spec.sequence_length
    return Tried(spec, Trial(**{"digest": spec.digest, "id": spec.id, "tokens_per_step": tokens, **figures, **values}))


def _tuning(**values: Any) -> Tuning:
    broken = replace(TINY, attention="eager")
    known = {
        "space": Space(TINY, axes_of({"micro_batch_size": [8, 16]})),
        "objective": OBJECTIVES["throughput"],
        "seconds_given": 600.0,
        "begun_at": TINY,
        "winner": FAST,
        "tried": [_tried(TINY, 0.1), _tried(FAST, 0.15), _tried(broken, 0.0, failure="it broke", kind="error")],
        "compared": {(TINY, FAST): Turns(-0.2877, 0.003, 2)},
        "refused": Counter({"one cannot": 12}),
        "too_large": 3,
        "left": 40,
        "notes": ("no time was left for parity",),
        "seconds": 61.0,
    }
    return Tuning(**{**known, **values})


def test_the_page_says_what_is_best_how_sure_and_what_was_not_tried() -> None:
    text = "\n".join(page(_tuning()))
    for line in (
        FAST.id,
        "as a trial of 9 steps: 109,227 tokens/s/GPU (±0.4 %), 1.0 GiB",
        f"+33.3 % tokens/s against {TINY.id}, where the search began",
        f"in turns: {FAST.id} is better than {TINY.id}: +33.3 % tokens/s (+32.9 % to +33.7 %), 2 pairs",
        "parity: not shown",
        "12 cannot be: one cannot",
        "3 of those looked at do not fit",
        "  40 promised too little, or no time was left for them",
        "note: no time was left for parity",
        "3 trials in 61 s",
    ):
        assert line in text


def test_where_memory_was_predicted_the_page_says_of_what_is_compiled_how() -> None:
    lines = [[line for line in page(_tuning(limit_bytes=limit)) if "do not fit" in line] for limit in (0, 2**30)]
    assert ["compiled" in line for (line,) in lines] == [False, True]


@pytest.mark.parametrize(("log", "verdict"), [(-0.2877, "second"), (0.0, "tie")])
def test_of_turns_that_have_not_decided_it_neither_page_nor_document_has_a_verdict(
    log: float, verdict: str, golden: Golden
) -> None:
    for rivals in ([], [TINY]):
        tuning = _tuning(compared={(TINY, FAST): Turns(log, 0.003, 1)}, rivals=rivals)
        golden([line for line in page(tuning) if "in turns" in line or "decided" in line])
        told = document(tuning, {})
        assert told["compared"][0]["verdict"] == ("undecided" if rivals else verdict)
        assert len(told["ties"]) == (verdict == "tie" and not rivals)


def test_less_memory_is_told_as_less(golden: Golden) -> None:
    tried = [_tried(TINY, 0.1, peak_reserved_bytes=2**30), _tried(FAST, 0.15, peak_reserved_bytes=7 * 2**27)]
    turns = {(TINY, FAST): Turns(-0.1335, 0.003, 2)}
    lines = [*page(_tuning(objective=OBJECTIVES["memory"], tried=tried, compared=turns))]
    golden([line for line in lines if "memory" in line])


def test_of_a_command_it_is_told_which_of_its_losses_were_compared(golden: Golden) -> None:
    start, other = (ScriptSpec(command=f"python train.py {word}") for word in ("--a", "--b"))
    tried = [Tried(one, replace(_tried(TINY, 0.1).trial, losses=(1.0,))) for one in (start, other)]
    for winner in (start, other):
        lines = [*page(_tuning(begun_at=start, winner=winner, tried=tried, compared={}))]
        golden([line for line in lines if "parity" in line])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"compared": {}}, ["decided: no other came as near as trials scatter"]),
        ({}, ["decided: by turns with all that came as near as trials scatter"]),
        ({"rivals": [TINY]}, [f"not decided: turns have not told it yet from {TINY.id}; give more --minutes"]),
        ({"ended": "interrupted"}, []),
    ],
)
def test_a_page_says_whether_the_winner_is_decided(values: dict[str, Any], said: list[str]) -> None:
    lines = [line.strip() for line in page(_tuning(**values))]
    assert [line for line in lines if "decided: " in line] == said


def test_a_page_without_a_winner() -> None:
    lines = list(page(_tuning(winner=None, compared={}, tried=())))
    assert lines[0] == "no winner"


def test_a_page_of_which_everything_was_tried_says_of_nothing_that_it_was_not(golden: Golden) -> None:
    nothing = {"left": 0, "refused": Counter(), "too_large": 0}
    tuning = _tuning(**nothing, tried=(_tried(FAST, 0.15),))
    text = "\n".join(page(tuning))
    assert "not tried" not in text
    golden(text)


def test_what_others_have_spoilt_is_told_with_its_reason(golden: Golden) -> None:
    spoilt = {"disturbances": ("another process on the hardware: python 7",)}
    tried = (_tried(TINY, 0.1, **spoilt), _tried(TINY, 0.1), _tried(FAST, 0.15, **spoilt))
    text = "\n".join(page(_tuning(tried=tried)))
    golden(text)


def test_what_was_recorded_stands_on_lines_of_its_own() -> None:
    result = CaseResult(
        id=FAST.id, digest=FAST.digest, nodeid="", machine="m", verdict="new", reason="none yet", updated="a\nb"
    )
    lines = list(page(_tuning(case=Concluded(result=result))))
    at = lines.index("  as a case, as its test launches it: new: none yet")
    assert lines[at + 1 : at + 3] == ["    a", "    b"]


def test_an_interrupted_search_ends_as_shells_expect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "find_machine", lambda: MACHINE)
    monkeypatch.setattr(Tuner, "run", lambda _: _tuning(ended="interrupted", notes=()))
    assert main(["tune", "llama-tiny", "--gpus", "0", "--record"]) == 130
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == FAST.id
    golden(err.splitlines()[-2:])


def test_a_trial_that_ended_with_an_error_after_its_record_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "find_machine", lambda: MACHINE)
    monkeypatch.setattr(Run, "bad_ends", property(lambda _: ["a launch: ended with 1"]))
    monkeypatch.setattr(Tuner, "run", lambda _: _tuning())
    assert main(["tune", "llama-tiny", "--gpus", "0"]) == 1
    assert "ended with 1" in capsys.readouterr().err


def test_the_test_of_a_winner_checks_the_very_spec() -> None:
    lines, names, checked = list(winners_test(FAST, 2)), dict[str, Any](), list[TrainSpec]()
    assert lines[-1] == "# pytest test_tuned.py --gpus 2"
    exec("\n".join(lines), names)
    names["test_tuned"](SimpleNamespace(check=checked.append))
    assert checked == [FAST]


def test_the_test_of_a_command_checks_the_very_spec() -> None:
    spec = ScriptSpec(command="torchrun --nproc-per-node 2 train.py {micro_batch_size}", micro_batch_size=4, tokens=64)
    names, checked = dict[str, Any](), list[ScriptSpec]()
    exec("\n".join(winners_test(spec, 2)), names)
    names["test_tuned"](SimpleNamespace(check=checked.append))
    assert checked == [spec]


@pytest.mark.parametrize(("verdict", "is_held"), [("pass", True), ("inconclusive", True), ("regressed", False)])
def test_a_winner_that_was_recorded_before_is_held_where_its_baseline_holds_it(
    verdict: Any, is_held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = CaseResult(id=FAST.id, digest=FAST.digest, nodeid="", machine="m", verdict=verdict, reason="it is so")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "find_machine", lambda: MACHINE)
    monkeypatch.setattr(Tuner, "run", lambda _: _tuning(case=Concluded(result=result)))
    assert main(["tune", "llama-tiny", "--gpus", "0", "--record"]) == (0 if is_held else 1)
    out, err = capsys.readouterr()
    assert ("not recorded:" in err) != is_held
    assert ("def test_tuned(perf):" in out) == is_held


@pytest.mark.parametrize(
    ("objective", "values", "why"),
    [
        ("throughput", {"ended": "its time was over"}, "its time was over"),
        ("throughput", {"tried": ()}, "see above what became of each"),
        ("throughput", {}, "the fastest are not sound, see the notes above"),
        ("energy", {}, "of 2 that trained none told of its energy"),
    ],
)
def test_why_there_is_no_winner_is_told(
    objective: str,
    values: dict[str, Any],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    golden: Golden,
) -> None:
    monkeypatch.setattr(machine, "find_machine", lambda: MACHINE)
    monkeypatch.setattr(
        Tuner, "run", lambda _: _tuning(**{"winner": None, "objective": OBJECTIVES[objective], **values})
    )
    assert main(["tune", "llama-tiny", "--gpus", "0"]) == 1
    golden(capsys.readouterr().err.splitlines()[-1])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"least": (TINY, 2**40), "limit_bytes": 2**34},
            "with 1024.0 GiB predicted, and a rank on this host may hold 16.0 GiB",
        ),
        ({"least": (TINY, 0)}, "asks for the least, and ran out of 1.0 GiB"),
    ],
)
def test_of_what_fits_nowhere_the_least_that_it_needs_is_told(
    values: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "find_machine", lambda: MACHINE)
    monkeypatch.setattr(Tuner, "run", lambda _: _tuning(winner=None, tried=(), **values))
    assert main(["tune", "llama-tiny", "--gpus", "0", "--memory-limit", "1GiB"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith(said)


def test_the_document_is_json_and_holds_every_trial() -> None:
    values = json.loads(json.dumps(document(_tuning(), {"kind": "test"}), allow_nan=False))
    assert values["winner"]["id"] == FAST.id
    assert values["winner"]["tokens_per_second_per_gpu"] == pytest.approx(16 * 1024 / 0.15)
    assert [one["failure"] for one in values["trials"]] == ["", "", "it broke"]
    assert TrainSpec.from_dict(values["trials"][1]["spec"]) == FAST
