"""Texts: what is read, how it becomes rows and samples, and what is refused in one line before anything is trained."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.settings.data import TextFiles, resolve_text

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from pytest_llmperf.records.ranks import RefusedError  # noqa: E402
from pytest_llmperf.worker.recipes.huggingface import data as rows  # noqa: E402 - they need torch
from pytest_llmperf.worker.recipes.huggingface import data as token_cache  # noqa: E402
from pytest_llmperf.worker.recipes.huggingface import data as training_data  # noqa: E402
from pytest_llmperf.worker.recipes.huggingface.data import (  # noqa: E402  # noqa: E402
    REAL_TOKENS,
    ByteTokenizer,
    TextSamples,
    Tokens,
    counted,
    read,
)
from tests.golden import Golden  # noqa: E402

pytestmark = [pytest.mark.torchrun, pytest.mark.filterwarnings("ignore")]

SPEC = TrainSpec(model="llama-tiny", data="text", sequence_length=64)
END, PADDING = ByteTokenizer.end_of_text, ByteTokenizer.padding


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMPERF_CACHE_DIR", str(tmp_path / "cache"))


def parquet(path: Path, texts: Sequence[Any], column: str = "text") -> str:
    pa = pytest.importorskip("pyarrow")
    path.parent.mkdir(parents=True, exist_ok=True)
    pytest.importorskip("pyarrow.parquet").write_table(pa.table({column: pa.array(texts)}), path)
    return str(path)


def data_of(**values: Any) -> training_data.TrainingData:
    steps = values.pop("steps", 4)
    return training_data.training_data(replace(SPEC, **values), steps, values.pop("vocabulary", 512))


def refusal(**values: Any) -> str:
    with pytest.raises(RefusedError) as refused:
        data_of(**values)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def tokens_of(*documents: Sequence[int]) -> Tokens:
    flat = [token for document in documents for token in document]
    return Tokens(np.asarray(flat, dtype=np.int32), np.asarray([len(one) for one in documents], dtype=np.int64))


# -- reading


def test_a_slice_is_the_one_that_datasets_would_read(tmp_path: Path) -> None:
    texts = [f"text {number}" for number in range(50)]
    path = parquet(tmp_path / "train-00000-of-00001.parquet", texts)
    assert read(resolve_text(path, "train")) == texts
    assert read(resolve_text(path, "train[:10%]")) == texts[:5]
    assert read(resolve_text(str(tmp_path), "train[10:-5]")) == texts[10:-5]
    assert read(resolve_text(str(tmp_path), "train[40:100]")) == texts[40:]


def test_no_more_is_read_than_the_groups_of_rows_of_the_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    texts, was_read, whole = [f"text {number}" for number in range(40)], list[Any](), pq.ParquetFile.read_row_group
    for number in range(2):
        part = pa.table({"text": texts[20 * number : 20 * number + 20]})
        pq.write_table(part, tmp_path / f"train-{number}.parquet", row_group_size=8)

    def noted(file: Any, group: int, columns: list[str]) -> Any:
        was_read.append(group)
        return whole(file, group, columns)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    for words, wanted, groups in (
        ("train[18:30]", texts[18:30], [2, 0, 1]),
        ("train[:10%]", texts[:4], [0]),
        ("train[-1:]", texts[-1:], [2]),
        ("train", texts, [0, 1, 2, 0, 1, 2]),
    ):
        was_read.clear()
        assert (read(resolve_text(str(tmp_path), words)), was_read) == (wanted, groups), words


def test_files_of_a_split_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    parquet(tmp_path / "train-00001-of-00002.parquet", ["b"])
    parquet(tmp_path / "train-00000-of-00002.parquet", ["a"])
    parquet(tmp_path / "test-00000-of-00001.parquet", ["c"])
    assert read(resolve_text(str(tmp_path), "train")) == ["a", "b"]


def test_a_row_of_a_txt_file_is_a_paragraph(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One\nline.\n\nTwo: é.\n", encoding="utf-8")
    assert [row.strip() for row in read(resolve_text(str(tmp_path), "train"))] == ["One\nline.", "Two: é."]


# -- bad input


def test_an_empty_dataset_is_refused(tmp_path: Path, golden: Golden) -> None:
    golden(refusal(text=parquet(tmp_path / "a.parquet", [])))
    golden(refusal(text=parquet(tmp_path / "b.parquet", ["", " ", None])))
    (tmp_path / "c.txt").write_text("")
    golden(refusal(text=str(tmp_path / "c.txt")))


def test_one_row_too_short_to_fill_one_is_refused_and_a_long_one_is_enough(tmp_path: Path, golden: Golden) -> None:
    line = refusal(text=parquet(tmp_path / "a.parquet", ["short"]))
    golden(line)
    data = data_of(text=parquet(tmp_path / "b.parquet", ["long " * 20]), steps=4)
    assert data.facts["num_rows"] == 1
    assert data.evidence(num_samples=4)["epochs"] == 4


def test_fewer_rows_than_a_step_takes_are_refused(tmp_path: Path, golden: Golden) -> None:
    path = parquet(tmp_path / "a.parquet", ["some text of no length"] * 3)
    line = refusal(text=path, rows="padded", gpus=4)
    golden(line)
    assert data_of(text=path, rows="padded", gpus=3).facts["num_rows"] == 3


@pytest.mark.parametrize(("column", "there"), [("content", "'content'"), ("Text", "'Text'")])
def test_a_missing_column_is_answered_with_those_that_are_there(
    tmp_path: Path, column: str, there: str, golden: Golden
) -> None:
    line = refusal(text=parquet(tmp_path / "a.parquet", ["x"], column))
    golden(line)


def test_a_column_of_numbers_is_refused(tmp_path: Path, golden: Golden) -> None:
    golden(refusal(text=parquet(tmp_path / "a.parquet", [1, 2])))


def test_bytes_that_are_no_utf_8_are_told_with_their_place(tmp_path: Path, golden: Golden) -> None:
    pa = pytest.importorskip("pyarrow")
    odd = pa.Array.from_buffers(pa.string(), 1, [None, *pa.array([b"\xff"], pa.binary()).buffers()[1:]])
    pytest.importorskip("pyarrow.parquet").write_table(pa.table({"text": odd}), tmp_path / "b.parquet")
    golden(refusal(text=str(tmp_path / "b.parquet")))


@pytest.mark.parametrize("content", [b"", b"PAR1 and no more", None])
def test_a_broken_parquet_is_refused(tmp_path: Path, content: bytes | None, golden: Golden) -> None:
    path = tmp_path / "a.parquet"
    whole = Path(parquet(path, ["text " * 1000])).read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    golden(refusal(text=str(path)))


@pytest.mark.parametrize("split", ["train[60:]", "train[12%:13%]"])
def test_a_slice_that_the_text_does_not_have_is_refused(tmp_path: Path, split: str) -> None:
    line = refusal(text=parquet(tmp_path / "a.parquet", ["x"] * 10), split=split)
    assert line == f"text {tmp_path / 'a.parquet'} ({split}): nothing stands in its 0 rows; name another text or split"


# -- tokenizers


def tokenizer_at(folder: Path, *, end: bool = True, start: bool = False) -> str:
    """A small one of whole words, as ``save_pretrained`` writes it."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {word: number for number, word in enumerate(["<unk>", "</s>", "<s>", "one", "two", "three"])}
    model = tokenizers.models.WordLevel(words, unk_token="<unk>")
    own = tokenizers.Tokenizer(model)
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if start:
        own.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    named = {"eos_token": "</s>"} if end else {}
    transformers.PreTrainedTokenizerFast(tokenizer_object=own, **named).save_pretrained(folder)
    return str(folder)


def test_a_local_tokenizer_makes_the_tokens(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", ["one two", "three"])
    settings: dict[str, Any] = {"text": path, "sequence_length": 4, "tokenizer": tokenizer_at(tmp_path / "t")}
    assert data_of(**settings).samples[0]["input_ids"].tolist() == [3, 4, 1, 5]
    alone = {**settings, "tokenizer": str(tmp_path / "t" / "tokenizer.json")}
    assert data_of(**alone).samples[0]["input_ids"].tolist() == [3, 4, 1, 5]  # </s> is known by its name


def test_what_a_tokenizer_puts_around_a_text_is_there_where_a_text_is_a_row(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "text": parquet(tmp_path / "a.parquet", ["one two", "three"]),
        "tokenizer": tokenizer_at(tmp_path / "t", start=True),
        "sequence_length": 4,
    }
    both = [data_of(**settings, rows="padded").samples[index]["input_ids"].tolist() for index in range(2)]
    assert sorted(both) == [[2, 3, 4, 1], [2, 5, 1, 1]]
    assert data_of(**settings).samples[0]["input_ids"].tolist() == [3, 4, 1, 5]


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused(tmp_path: Path, golden: Golden) -> None:
    spec = replace(SPEC, tokenizer=tokenizer_at(tmp_path / "big"))
    with pytest.raises(RefusedError) as raised:
        training_data.training_data(spec, 4, 5)
    golden(raised)
    with pytest.raises(RefusedError) as raised:
        training_data.training_data(SPEC, 4, 257)
    golden(raised)


def test_a_tokenizer_that_cannot_be_used_is_told_in_one_line(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    golden(refusal(tokenizer=str(tmp_path / "tokenizer.json")))
    endless = tokenizer_at(tmp_path / "t", end=False)
    config = tmp_path / "t" / "tokenizer.json"
    config.write_text(json.dumps(json.loads(config.read_text())).replace("</s>", "<none>"))
    golden(refusal(tokenizer=endless))


# -- rows


def test_packed_rows_are_one_stream_with_ends_between_documents() -> None:
    found = rows.packed(tokens_of([1, 2, 3], [], [4], [5, 6, 7, 8, 9]), 4, END)
    assert found.ids.tolist() == [[1, 2, 3, END], [4, END, 5, 6], [7, 8, 9, END]]
    assert (found.lengths, found.num_tokens, found.left_out) == (None, 12, 0)
    assert rows.packed(tokens_of([1, 2]), 2, END).left_out == 1
    assert len(rows.packed(tokens_of([], []), 4, END).ids) == 0


def test_padded_rows_leave_out_what_has_nothing_to_predict() -> None:
    tokens = tokens_of([1, 2], [], [3], [4, 5, 6, 7, 8])
    found = rows.padded(tokens, 4, PADDING, keep_short=False)
    assert found.ids.tolist() == [[1, 2, PADDING, PADDING], [4, 5, 6, 7]]
    assert (found.num_tokens, found.left_out) == (6, 2)
    everything = rows.padded(tokens, 4, PADDING, keep_short=True)
    assert everything.lengths is not None
    assert everything.lengths.tolist() == [2, 0, 1, 4]


def test_padding_counts_in_the_loss_where_that_was_asked_for_and_nowhere_else() -> None:
    found = rows.padded(tokens_of([1, 2]), 4, PADDING, keep_short=True)
    sound, told = (TextSamples(found, length=1, seed=0, counts_padding=counts)[0] for counts in (False, True))
    assert sound["input_ids"].tolist() == told["input_ids"].tolist() == [1, 2, PADDING, PADDING]
    assert sound["attention_mask"].tolist() == told["attention_mask"].tolist() == [1, 1, 0, 0]
    assert sound["labels"].tolist() == [1, 2, -100, -100]
    assert told["labels"].tolist() == [1, 2, PADDING, PADDING]
    assert counted([sound, told])[REAL_TOKENS] == 4


def test_padding_that_is_the_end_of_a_text_masks_no_real_end() -> None:
    found = rows.padded(tokens_of([1, END]), 4, END, keep_short=False)
    assert TextSamples(found, length=1, seed=0, counts_padding=False)[0]["labels"].tolist() == [1, END, -100, -100]


def test_positions_begin_anew_with_each_document_and_nothing_predicts_its_first_token() -> None:
    found = rows.packed(tokens_of([1, 2, 3], [4], [5, 6, 7, 8, 9]), 6, END)
    apart = partial(rows.since, end_of_text=END)
    samples = TextSamples(found, length=2, seed=0, counts_padding=False, positions=apart)
    (first,) = [each for each in (samples[0], samples[1]) if each["input_ids"][0] == 1]
    assert first["input_ids"].tolist() == [1, 2, 3, END, 4, END]
    assert first["position_ids"].tolist() == [0, 1, 2, 3, 0, 1]
    assert first["labels"].tolist() == [-100, 2, 3, END, -100, END]
    assert counted([first, first])[REAL_TOKENS] == 12


@pytest.mark.parametrize("kind", ["packed_apart", "padding_free"])
def test_a_batch_as_one_row_is_made_of_its_samples_again(kind: str) -> None:
    tokens = tokens_of([1, 2, 3], [4, 5], [6, 7, 8, 9])
    is_packed = kind == "packed_apart"
    found = rows.packed(tokens, 4, END) if is_packed else rows.padded(tokens, 4, PADDING, keep_short=False)
    positions = partial(rows.since, end_of_text=END if is_packed else None)
    made = TextSamples(found, length=3, seed=0, counts_padding=False, positions=positions)
    samples = [made[number] for number in range(3)]
    batch = rows.flattened(samples)
    assert batch.pop(REAL_TOKENS) == (12 if is_packed else 9)
    assert batch["input_ids"].shape[0] == 1
    spec = TrainSpec(model="llama-tiny", data="text", rows=kind, sequence_length=4)
    for own, again in zip(samples, rows.unflattened(spec, batch), strict=True):
        assert {name: each.tolist() for name, each in own.items()} == {
            name: each.tolist() for name, each in again.items()
        }


# -- samples


def numbered(number: int, length: int = 2) -> rows.Rows:
    return rows.packed(tokens_of(range(number * length - 1)), length, END)


def test_every_row_is_once_in_each_epoch_in_an_order_of_its_own() -> None:
    samples = TextSamples(numbered(10), length=30, seed=1, counts_padding=False)
    epochs = [[samples.row_of(epoch * 10 + place) for place in range(10)] for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_orders_of_epochs_that_are_over_are_not_kept() -> None:
    samples = TextSamples(numbered(100), length=10_000, seed=1, counts_padding=False)
    sizes = [len(pickle.dumps(samples)) for epoch in range(100) if samples.row_of(epoch * 100) >= 0]
    assert sizes[-1] < sizes[1] + 100


def test_what_a_sample_is_depends_on_the_seed_and_not_on_the_steps() -> None:
    made = [TextSamples(numbered(50), length=n, seed=s, counts_padding=False) for n, s in ((40, 1), (400, 1), (40, 2))]
    short, long, other = ([samples.row_of(index) for index in range(40)] for samples in made)
    assert short == long != other


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_an_epoch_without_a_row_in_common(ranks: int) -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")
    samples = TextSamples(numbered(12), length=12, seed=0, counts_padding=False)
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(samples), 2, drop_last=False)
    shares = [
        [samples.row_of(index) for batch in data_loader.BatchSamplerShard(sampler, ranks, rank) for index in batch]
        for rank in range(ranks)
    ]
    assert sorted(row for share in shares for row in share) == list(range(12))


# -- tokens that are kept


def test_tokens_are_made_once_and_made_anew_where_the_cache_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts: list[TextFiles] = []

    def watched(text: TextFiles) -> list[str]:
        texts.append(text)
        return read(text)

    monkeypatch.setattr(training_data, "read", watched)
    first, second = (data_of().samples[0]["input_ids"].tolist() for _ in range(2))
    assert first == second
    assert len(texts) == 1
    (kept,) = (tmp_path / "cache" / "tokens").iterdir()
    for broken in (b"", b"PK\x03\x04 none", kept.read_bytes()[:5000]):
        kept.write_bytes(broken)
        assert data_of().samples[0]["input_ids"].tolist() == first
        assert token_cache.kept(kept) is not None
    assert len(texts) == 4
    data_of(split="train[:50%]")
    assert len(texts) == 5


def test_a_cache_that_cannot_be_written_costs_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LLMPERF_CACHE_DIR", str(tmp_path / "file"))
    assert data_of().facts["num_rows"] > 1000


def test_what_was_read_is_told(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", ["0123456789", "", "x"])
    facts: Mapping[str, Any] = data_of(text=path, rows="padded_in_loss", sequence_length=8).facts
    spec = replace(SPEC, text=path)
    assert facts == {
        "text": spec.text_files.fingerprint,
        "split": "train",
        "tokenizer": "bytes-258",
        "rows": "padded_in_loss",
        "num_documents": 3,
        "num_rows": 3,
        "num_tokens": 9,
        "num_tokens_left_out": 2,
    }


# -- what is told without a launch


def test_packed_rows_are_planned_as_random_ones_and_padded_ones_refused(golden: Golden) -> None:
    from pytest_llmperf.worker.estimate.memory_estimator import plan  # noqa: PLC0415 - it alone needs fake tensors

    config = SPEC.architecture.config
    assert plan(SPEC, config) == plan(replace(SPEC, data="random"), config)
    with pytest.raises(ValueError, match="rows='padded' are not") as raised:
        plan(replace(SPEC, rows="padded"), config)
    golden(raised)
