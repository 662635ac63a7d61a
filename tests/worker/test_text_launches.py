"""Launches on a text, for real: what they read, in which order, and what they tell of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.exact import changes
from pytest_llmperf.judge.validity import troubles
from pytest_llmperf.records.failure import Failure
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.run.derived_metrics import ModelFlops
from pytest_llmperf.support import codec
from tests.worker.import_patch import in_the_rank
from tests.worker.launching import launch, launched

pytest.importorskip("torch")
pytest.importorskip("pyarrow")

pytestmark = pytest.mark.torchrun

SPEC = TrainSpec(model="llama-tiny", data="text", sequence_length=32, micro_batch_size=4, steps=6, min_steps=6)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return launched(SPEC, tmp_path_factory.mktemp("text") / "run")


def test_two_launches_of_one_seed_lose_the_same_to_the_last_digit(first: Launch, tmp_path: Path) -> None:
    again = launched(SPEC, tmp_path / "again")
    assert again.losses == first.losses
    assert changes([again], [first]) == ()
    assert troubles(SPEC, first) == ()
    # What is learnt does not depend on how long one measures.
    longer = launched(replace(SPEC, steps=8, min_steps=8), tmp_path / "longer")
    assert longer.losses[:6] == first.losses


def test_a_launch_tells_what_it_has_read(first: Launch) -> None:
    told = first.evidence["data"]
    assert told["text"] == SPEC.text_files.fingerprint
    assert told["num_rows"] == told["num_tokens"] // 32 > 3000
    assert first.evidence["epochs"] == pytest.approx(6 * 4 / told["num_rows"], abs=1e-6)
    assert (first.real_share, first.ranks[0].real_tokens) == (1, ())
    names = [check.metric for check in ModelFlops().figures(SPEC, (first,))]
    assert "real_token_share" not in names
    assert first.losses[-1] < first.losses[0]


def written(folder: Path, *paragraphs: str) -> str:
    path = folder / "mine.txt"
    path.write_text("\n\n".join(paragraphs), encoding="utf-8")
    return str(path)


@pytest.mark.wide
def test_ranks_share_each_epoch_and_count_their_real_tokens(tmp_path: Path) -> None:
    # Sixteen texts of unlike lengths: two steps of two ranks, two micro-batches of two, are one epoch.
    lengths = [3 + 2 * number for number in range(16)]
    # Of one letter alone what attention looks for has no gradient.
    text = written(tmp_path, *((ascii_lowercase[length % 7 :] * 3)[:length] for length in lengths))
    spec = replace(
        SPEC, text=text, rows="padded", gpus=2, micro_batch_size=2, gradient_accumulation_steps=2, steps=8, min_steps=8
    )
    record = launched(spec, tmp_path / "run")
    assert troubles(spec, record) == ()
    assert record.tokens_per_step == 2 * 2 * 2 * 32
    real = [rank.real_tokens for rank in record.ranks]
    assert [len(each) for each in real] == [8, 8]
    # Each row is cut off at 32 tokens; over both ranks an epoch has each once, whatever the order.
    epoch = sum(min(length, 32) for length in lengths)
    assert [sum(rank[step] + rank[step + 1] for rank in real) for step in (0, 2, 4, 6)] == [epoch] * 4
    assert real[0] != real[1]
    assert record.evidence["epochs"] == 4
    assert record.real_share == pytest.approx(4 * epoch / (8 * record.tokens_per_step))
    assert codec.read(Launch, codec.plain(record)) == record
    shown = {check.metric: check for check in ModelFlops().figures(spec, (record,))}
    rate, share = shown["real_tokens_per_second_per_gpu"], shown["real_token_share"]
    assert rate.value == pytest.approx(record.tokens_per_second_per_gpu * record.real_share)
    assert not rate.gates
    assert share.value == record.real_share


class TestApart:
    """Rows whose documents do not see one another."""

    SPEC = replace(SPEC, model_precision="fp32", mixed_precision="no")

    def test_without_padding_the_same_is_learnt_from_fewer_tokens(self, tmp_path: Path) -> None:
        padded, free = (launched(replace(self.SPEC, rows=rows), tmp_path / rows) for rows in ("padded", "padding_free"))
        assert free.losses == pytest.approx(padded.losses, abs=1e-4)
        assert free.evidence["documents"] == "apart"
        assert troubles(replace(self.SPEC, rows="padding_free"), free) == ()
        # Each step has the tokens of its documents, and no others.
        (own,) = free.ranks
        assert own.step_tokens == own.real_tokens == padded.ranks[0].real_tokens
        assert (free.real_share, free.is_uneven) == (1, True)
        assert free.tokens_per_step == pytest.approx(sum(own.real_tokens) / 6, abs=1)

    @pytest.mark.wide
    def test_packed_documents_are_apart_or_the_launch_counts_for_nothing(self, tmp_path: Path) -> None:
        spec = replace(self.SPEC, rows="packed_apart")
        sound = launched(spec, tmp_path / "sound")
        assert troubles(spec, sound) == ()
        assert (sound.tokens_per_step, sound.real_share, sound.evidence["documents"]) == (4 * 32, 1, "apart")
        lost = "module.find_packed_sequence_indices = lambda position_ids: None"
        variables = in_the_rank(tmp_path, "transformers.masking_utils", lost)
        mixed = launched(spec, tmp_path / "run", variables=variables)
        (line,) = troubles(spec, mixed)
        assert "other documents" in line


def test_padding_in_the_loss_makes_it_fall_far_below_what_was_learnt(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"text": written(tmp_path, *["A short line."] * 16, *["And a second one."] * 16)}
    specs = [replace(SPEC, **settings, rows=rows, sequence_length=128) for rows in ("padded", "padded_in_loss")]
    sound, counted = (launched(spec, tmp_path / spec.rows) for spec in specs)
    assert sound.ranks[0].real_tokens == counted.ranks[0].real_tokens
    # Nine tenths of a row are padding, which is soon known.
    assert counted.losses[-1] < sound.losses[-1] - 0.3


@pytest.mark.parametrize("gpus", [1, 2])
def test_what_cannot_be_read_is_refused_in_one_line_by_any_number_of_ranks(tmp_path: Path, gpus: int) -> None:
    path = tmp_path / "train.parquet"
    path.write_bytes(b"PAR1 and no more")
    failure = launch(replace(SPEC, text=str(path), gpus=gpus), tmp_path / "run")
    assert isinstance(failure, Failure)
    assert failure.kind == "refused"
    assert failure.reason.startswith(f"refused: text {path}: cannot be read (")
    assert "\n" not in failure.reason
