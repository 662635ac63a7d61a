"""Which text a spec names, what of it enters its identity, and what is refused before anything is launched."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.store import same_settings
from pytest_llmperf.judge.validity import troubles
from pytest_llmperf.settings import data, registry
from pytest_llmperf.settings.data import Split, lacks_rows, paragraphs, resolve_text
from pytest_llmperf.settings.train_spec import SpecError
from tests.fakes import Fake, launch_of
from tests.golden import Golden

SPEC = TrainSpec(model="llama-tiny", data="text", sequence_length=64)


def written(folder: Path, *names: str, text: str = "One.\n\nTwo.\n") -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + name)
    return folder


def refusal(**values: Any) -> str:
    with pytest.raises(SpecError) as refused:
        replace(SPEC, **values)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("words", "slug"),
    [
        ("train", "train"),
        ("train[:10%]", "train-to10pct"),
        ("train[10%:20%]", "train-10pctto20pct"),
        ("test[-100:]", "test-minus100to"),
        ("train[5:-5]", "train-5tominus5"),
        ("train[10%:2000]", "train-10pctto2000"),
    ],
)
def test_a_split_is_as_datasets_has_it_and_an_id_spells_it_out(words: str, slug: str) -> None:
    assert Split(words).slug == slug


@pytest.mark.parametrize(
    "words",
    [
        "",
        "train[",
        "train[10%]",
        "train[:10]+test",
        "train[:1.5%]",
        "train [:10]",
        "[:10]",
        "train[a:b]",
        "train[:200%]",
        "test[-101%:]",
    ],
)
def test_a_malformed_slice_is_answered_with_what_is_expected(words: str, golden: Golden) -> None:
    golden(refusal(split=words))


def test_the_text_that_ships_is_read_where_none_is_named() -> None:
    files = SPEC.text_files
    assert [path.name for path in files.files] == ["train-00000-of-00001.parquet"]
    assert SPEC.id == "llama-tiny-bf16-sdpa-seq64-mbs1-text-gpus1"
    assert sum(path.stat().st_size for path in files.files[0].parent.iterdir()) < 2**17


def test_files_belong_to_the_split_that_their_names_begin_with(tmp_path: Path) -> None:
    names = ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "validation.parquet", "test_a.parquet"]
    written(tmp_path, *names, "README.txt")
    of = {split: [p.name for p in resolve_text(str(tmp_path), split).files] for split in ("train", "validation")}
    assert of == {"train": names[:2], "validation": names[2:3]}
    assert [p.name for p in resolve_text(str(tmp_path), "test[:5]").files] == names[3:]


@pytest.mark.parametrize("name", ["data/train-0.parquet", "train/0000.parquet", "train.txt", "anything.txt"])
def test_each_layout_of_a_folder_is_found(tmp_path: Path, name: str) -> None:
    assert resolve_text(str(written(tmp_path, name)), "train").files == (tmp_path / name,)


def test_a_split_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path, golden: Golden) -> None:
    written(tmp_path, "train-0.parquet", "test-0.parquet")
    golden(refusal(text=str(tmp_path), split="validation"))
    golden(refusal(text=str(tmp_path / "train-0.parquet"), split="test"))


def test_a_folder_of_configurations_names_them(tmp_path: Path, golden: Golden) -> None:
    written(tmp_path, "wikitext-2-raw-v1/train-0.parquet", "wikitext-103-v1/train-0.parquet")
    golden(refusal(text=str(tmp_path)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nowhere", "no such file or folder; expected parquet, .txt"),
        ("./owner/name", "no such file or folder"),
        ("owner/name.parquet", "no such file or folder"),
        ("~nobody-of-that-name/text", "cannot be looked up"),
        ("x" * 5000, "cannot be looked up (File name too long)"),
    ],
)
def test_a_path_that_is_missing_is_told_in_one_line(text: str, said: str) -> None:
    assert said in refusal(text=text)


def test_an_empty_folder_and_another_format_are_told_in_one_line(tmp_path: Path, golden: Golden) -> None:
    golden(refusal(text=str(tmp_path)))
    golden(refusal(text=str(written(tmp_path, "a.json") / "a.json")))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_told_in_one_line(tmp_path: Path, golden: Golden) -> None:
    (written(tmp_path, "a.txt") / "a.txt").chmod(0)
    golden(refusal(text=str(tmp_path)))


def test_a_texts_identity_is_what_it_says(tmp_path: Path) -> None:
    here, there, other = (written(tmp_path / name, "train.txt", text=name[0]) for name in ("a/x", "a/y", "b/x"))
    specs = [replace(SPEC, text=str(folder)) for folder in (here, there, other)]
    assert specs[0].digest == specs[1].digest != specs[2].digest
    assert specs[0].digest != SPEC.digest
    assert specs[0].id.startswith("llama-tiny-bf16-sdpa-seq64-mbs1-text-x-")
    assert len({spec.id for spec in specs}) == 3  # x and x by what they say, x and y by their names


def test_a_text_that_is_written_anew_is_another(tmp_path: Path) -> None:
    spec = replace(SPEC, text=str(written(tmp_path, "a.txt")))
    before = spec.digest
    written(tmp_path, "a.txt", text="Another, longer one.")
    assert spec.digest != before


@pytest.mark.parametrize("values", [{"split": "train[:50%]"}, {"split": "test"}, {"rows": "padded"}])
def test_what_is_read_and_how_is_part_of_digest_id_and_training(values: dict[str, Any]) -> None:
    other = replace(SPEC, **values)
    assert other.digest != SPEC.digest
    assert other.id != SPEC.id
    assert TrainSpec.from_dict(json.loads(json.dumps(other.to_dict()))).digest == other.digest


def test_a_tokenizers_identity_is_what_it_says(tmp_path: Path) -> None:
    for name in ("here", "there"):
        written(tmp_path / name, "tokenizer.json", text="{}")
        (tmp_path / name / "README.md").write_text(name)
    here, there = (replace(SPEC, tokenizer=str(tmp_path / name)) for name in ("here", "there"))
    assert here.digest == there.digest != SPEC.digest
    assert here.id.endswith(f"-text-here-{here.tokenizer_files.fingerprint[:6]}-gpus1")
    alone = replace(SPEC, tokenizer=str(tmp_path / "here" / "tokenizer.json"))
    assert alone.digest == here.digest  # nothing else in the folder has a say


@pytest.mark.parametrize(
    ("make", "said"),
    [
        ("", "no such file or folder, expected a folder as save_pretrained writes it"),
        ("tokenizer/README.md", "the folder holds no tokenizer, expected"),
    ],
)
def test_a_tokenizer_that_is_none_is_told_in_one_line(tmp_path: Path, make: str, said: str) -> None:
    if make:
        written(tmp_path, make)
    assert said in refusal(tokenizer=str(tmp_path / "tokenizer"))


def test_without_pyarrow_parquet_is_skipped_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, golden: Golden, tmp_path: Path
) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None if name == "pyarrow" else find_spec(name))
    golden(registry.why_skip(SPEC, num_gpus=0, num_cores=2))
    assert registry.why_skip(replace(SPEC, data="random"), num_gpus=0, num_cores=2) is None
    files = replace(SPEC, text=str(written(tmp_path, "a.txt")))
    assert registry.why_skip(files, num_gpus=0, num_cores=2) is None


def test_a_file_that_is_no_utf_8_is_told_in_one_line(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n\n\xff\xfe")
    golden(refusal(text=str(tmp_path / "a.txt")))
    (tmp_path / "a.txt").write_bytes(b"fine\n\n" * 20_000 + "ü".encode()[:1])
    assert "from byte 120000" in refusal(text=str(tmp_path / "a.txt"))


@given(st.text("a\nü\r", max_size=40), st.integers(1, 9))
def test_a_text_has_the_same_rows_in_whatever_parts_it_is_read(
    tmp_path_factory: pytest.TempPathFactory, text: str, part: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.txt"
    path.write_bytes(text.encode())
    with patch.object(data, "_PART", part):
        assert [*paragraphs(path)] == [row for row in path.read_text(encoding="utf-8").split("\n\n") if row]


def test_of_a_large_text_only_a_part_is_held(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    path.write_bytes((b"x" * 98 + b"\n\n") * 100_000)
    text = resolve_text(str(path), "train")
    with patch.object(data, "_PART", 2**18):
        tracemalloc.start()
        try:
            rows, most = text.row_bytes, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert rows is not None
    assert (len(rows), set(rows)) == (100_000, {98})
    assert most < path.stat().st_size / 2


def test_a_text_without_a_blank_line_takes_as_long_a_byte_as_a_short_one(tmp_path: Path) -> None:
    """Its row was searched anew with each part: 200 MB took 18 s, and a gigabyte minutes."""
    path, seconds = tmp_path / "long.txt", list[float]()
    with patch.object(data, "_PART", 2**13):
        for size in (2**18, 2**24):
            path.write_bytes(b"word " * (size // 5))
            began = time.process_time()
            assert [len(row) for row in paragraphs(path)] == [size // 5 * 5]
            seconds.append((time.process_time() - began) / size)
    assert seconds[1] < 8 * seconds[0]


@pytest.mark.parametrize(
    ("rows", "enough"), [({}, 2), ({"rows": "padded"}, 3), ({"tokenizer": "own"}, 9), ({"split": "train[1:]"}, 1)]
)
def test_a_txt_of_fewer_rows_than_a_step_takes_is_known_before_a_launch(
    rows: dict[str, Any], enough: int, tmp_path: Path
) -> None:
    """Two rows of 64 bytes, of three texts; what a tokenizer of its own makes of them only a launch tells."""
    (tmp_path / "own").mkdir()
    (written(tmp_path, "own/tokenizer.json", text="{}") / "a.txt").write_text("é" * 30 + "\n\n" + "b" * 64 + "\n\nc")
    rows = {**rows, **({"tokenizer": str(tmp_path / "own")} if "tokenizer" in rows else {})}
    spec = replace(SPEC, text=str(tmp_path / "a.txt"), **rows)
    assert lacks_rows(replace(spec, micro_batch_size=enough)) == ""
    told = lacks_rows(replace(spec, micro_batch_size=enough + 1))
    assert (f"and a step takes {enough + 1} " in told) == ("tokenizer" not in rows), told


def test_a_launch_that_read_another_text_is_invalid(golden: Golden) -> None:
    random = replace(SPEC, data="random")
    assert troubles(SPEC, launch_of(SPEC)) == ()
    ran = replace(SPEC, split="test").text_files.fingerprint
    read = launch_of(SPEC).evidence["data"]
    other = launch_of(SPEC, Fake(evidence={"data": {**read, "text": ran}}))
    golden(troubles(SPEC, other))
    golden(troubles(SPEC, replace(launch_of(SPEC), evidence=launch_of(random).evidence)))
    golden(troubles(random, replace(launch_of(random), evidence=launch_of(SPEC).evidence)))


def test_a_baseline_of_a_text_that_is_another_by_now_can_still_be_read(tmp_path: Path, golden: Golden) -> None:
    spec = replace(SPEC, text=str(written(tmp_path, "a.txt")))
    values, digest = spec.to_dict(), spec.digest
    written(tmp_path, "a.txt", text="By now.")
    same_settings(values, digest)
    with pytest.raises(ValueError, match="other settings than") as raised:
        same_settings(SPEC.to_dict(), digest)
    golden(raised)
