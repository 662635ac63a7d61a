"""The id of a script: what of its work the words of its command do not show is in it by digits of the digest."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.settings.setting import SpecError
from pytest_llmperf.settings.spec import ScriptSpec, literal, read_spec, within

COMMAND = "python train.py --batch {micro_batch_size}"
SPEC = ScriptSpec(command=COMMAND)
SEARCHED: list[dict[str, Any]] = [{}, {"seed": 0}, {"command": COMMAND + " --more" * 20}]
UNUSUAL: list[dict[str, Any]] = [
    {"cwd": "examples"},
    {"tokens": 512},
    {"tokens": "sequences:64"},
    {"step": "AdamW"},
    {"seed": 0},
    {"env": {"LOUD": "1"}},
]


def test_a_command_alone_is_named_by_its_words() -> None:
    assert SPEC.id == "train-batch-1-gpus1"
    assert SPEC.capacity_id == "train-batch-max-gpus1"
    assert SPEC.changed(steps=20, memory_tolerance=0.1).id == SPEC.id


@pytest.mark.parametrize("fields", UNUSUAL, ids=str)
def test_what_the_words_do_not_show_ends_the_id(fields: dict[str, Any]) -> None:
    spec = SPEC.changed(**fields)
    assert spec.id == f"train-batch-1-{spec.digest[:6]}-gpus1"
    assert SPEC.changed(**fields, name="mine").id == "mine-gpus1"


def test_specs_that_are_other_work_have_other_ids() -> None:
    specs = [SPEC, *(SPEC.changed(**fields) for fields in UNUSUAL)]
    assert len({spec.id for spec in specs}) == len({spec.digest for spec in specs}) == len(specs)


@pytest.mark.parametrize("fields", SEARCHED, ids=str)
def test_the_search_for_the_largest_micro_batch_has_one_id_whatever_it_begins_at(fields: dict[str, Any]) -> None:
    assert len({SPEC.changed(**fields, micro_batch_size=size).capacity_id for size in (1, 8)}) == 1


STARTS = ["python -I {}", "accelerate launch --config_file a.yaml {}", "accelerate launch --config_file b.yaml {}"]
STARTS += ["torchrun --nproc-per-node {{gpus}} {}", "uv run {}", "accelerate launch --num_processes={{gpus}} {}"]
USUAL = {1: ["/usr/bin/python3.11 -u {}", "python {}"]}
USUAL[2] = ["torchrun --nproc-per-node {{gpus}} {}", "torchrun --standalone --nproc-per-node=2 {}"]


@pytest.mark.parametrize("gpus", USUAL)
def test_words_before_the_script_are_in_the_id_by_digits_unless_so_many_ranks_are_usually_started_so(gpus: int) -> None:
    plain = [ScriptSpec(command=start.format("train.py --x 1"), gpus=gpus) for start in USUAL[gpus]]
    assert {spec.id for spec in plain} == {f"train-x-1-gpus{gpus}"}
    starts = {*STARTS, "python {}", "deepspeed {}"} - {*USUAL[gpus]}
    specs = [ScriptSpec(command=start.format("train.py --x 1"), gpus=gpus) for start in starts]
    assert [spec.id for spec in specs] == [f"train-x-1-{spec.digest[:6]}-gpus{gpus}" for spec in specs]
    assert len({spec.id for spec in specs}) == len(specs)


def test_another_checkout_of_the_project_has_the_same_digest(tmp_path: Path) -> None:
    found = []
    for name in ("mine", "theirs"):
        root = tmp_path / name
        for folder in (".git", "code", "data"):
            (root / folder).mkdir(parents=True)
        (root / "train.py").touch()
        command = f"python {root}/train.py --out {root}/none --data={root}/data --log /tmp/log"
        found.append(within(ScriptSpec(command=command, cwd=str(root / "code")), root))
    assert found[0].cwd == found[1].cwd == "code"
    assert found[0].argv[1] == "../train.py"
    assert found[0].argv[3:] == [f"{tmp_path}/mine/none", "--data=../data", "--log", "/tmp/log"]
    specs = [spec.changed(command=spec.command.replace("/mine/", "/theirs/")) for spec in found]
    assert specs[0].digest == specs[1].digest
    assert within(specs[0], tmp_path / "mine").digest == specs[0].digest


def test_a_field_that_is_gone_says_nothing_in_an_old_file_where_it_has_its_default() -> None:
    spec = ScriptSpec(command="python train.py")
    old = read_spec({**spec.to_dict(), "training": 1})
    assert (old, old.digest) == (spec, spec.digest)
    with pytest.raises(SpecError, match="no field 'training'"):
        read_spec({**spec.to_dict(), "training": 2})


def test_words_in_two_pairs_of_braces_are_words_in_braces() -> None:
    spec = ScriptSpec(command="""python train.py {{x}} {gpus} '{"a": {"b": 1}}' {{gpus}} {{}}""", gpus=2)
    assert spec.argv[2:] == ["{x}", "2", '{"a": {"b": 1}}', "{gpus}", "{}"]
    assert not [*ScriptSpec(command="python train.py {{gpus}}", gpus=2).narrower()]
    assert ScriptSpec(command=literal(shlex.join(spec.argv))).argv == spec.argv


@pytest.mark.parametrize(
    "fields",
    [{"watch": 3}, {"env": 3}, {"env": "A=1"}, {"env": ["A=1"]}, {"command": ["python", "train.py"]}, {"tiny": 3}],
    ids=str,
)
def test_a_field_that_cannot_be_made_is_refused_in_a_line(fields: dict[str, Any]) -> None:
    (name, value) = next(iter(fields.items()))
    with pytest.raises(SpecError, match=rf"^ScriptSpec: {name}={re.escape(repr(value))}, expected "):
        SPEC.changed(**fields)


@pytest.mark.parametrize("words", ["cd . && python train.py", "python train.py | tee log", "python train.py > log"])
def test_what_only_a_shell_reads_is_refused(words: str) -> None:
    with pytest.raises(SpecError, match="no shell"):
        ScriptSpec(command=words)
    assert ScriptSpec(command=f"bash -c {shlex.quote(words)}").argv[2] == words


@pytest.mark.parametrize(
    "words", ["--hub-token abc", "--wandb_api_key=abc", "trainer.hub_token=abc", "x -p http://u:p@h"]
)
def test_a_command_shows_no_secret(words: str) -> None:
    with pytest.raises(SpecError, match="has a secret"):
        ScriptSpec(command=f"python train.py {words}")


def test_a_command_may_name_tokens_of_a_text_and_what_others_fill_in() -> None:
    spec = ScriptSpec(command="python train.py --eos-token </s> --pad_token=PAD --sort-key size --key-dim 64")
    assert spec.id.startswith("train-")
