"""What two trainings have in common, by their figures alone; and what is made small."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from pytest_llmperf.judge.trainings import judge_parity
from pytest_llmperf.plugin.needs import the_same_training
from pytest_llmperf.records.learning import FP32, GRADIENT, OWN, UPDATE, TensorError, TrainingErrors, merged_errors
from pytest_llmperf.run.findings import CaseFailedError
from pytest_llmperf.settings.models import built_in_names, resolve, small_config
from pytest_llmperf.settings.optimizer import true_optimizer
from pytest_llmperf.settings.parallelism import gathered_precision
from pytest_llmperf.settings.registry import in_fp32, plainest, small
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import codec
from tests.golden import Golden

ROUNDOFF = 2.0**-24


def tensor(kind: str, name: str, step: int, relative: float, *, norm: float = 1.0) -> TensorError:
    cosine = 1 - relative**2 / 2 if norm else 0.0
    return TensorError(kind=kind, tensor=name, step=step, true_norm=1.0, norm=norm, cosine=cosine, error=relative)


def training(
    seed: int = 1,
    times: float = 1.0,
    *,
    gradients: Mapping[str, float] | None = None,
    form: str = FP32,
    true_optimizer: bool = True,
) -> TrainingErrors:
    """One with errors of ``times`` 1e-6, but for the relative ones of ``gradients``."""
    given = {"a": 1e-6 * times, "b": 2e-6 * times, **(gradients or {})}
    return TrainingErrors(
        form=form,
        precision="fp32",
        roundoff=ROUNDOFF,
        seed=seed,
        losses=(7.0 + 1e-7 * times, 7.0),
        true_losses=(7.0, 7.0),
        true_norms=(2.0, 2.0),
        clipping_errors=(1e-8, -1e-8),
        tensors=tuple(
            tensor(kind, name, step, value)
            for kind in (GRADIENT, UPDATE)
            for name, value in given.items()
            for step in (1, 2)
        ),
        product_types={"q_proj": "float32"},
        true_optimizer=true_optimizer,
    )


PLAIN = [training(seed, times) for seed, times in enumerate((1.0, 1.1, 1.2, 1.3, 1.4), 1)]


def troubles(*trainings: TrainingErrors, plain: list[TrainingErrors] = PLAIN) -> tuple[str, ...]:
    return judge_parity(trainings, plain).troubles


class TestJudged:
    def test_as_far_off_as_the_plain_form_is_no_difference(self) -> None:
        parity = judge_parity([training(times=1.5)], PLAIN)
        assert parity.troubles == ()
        assert {check.metric for check in parity.checks} == {"loss_error", "gradient_error", "update_error"}

    def test_another_kernel_may_round_once_more_where_seeds_hardly_differ(self) -> None:
        plain = [training(seed, 1 + seed / 1000) for seed in range(1, 6)]
        assert troubles(training(times=1.9), plain=plain) == ()
        assert troubles(training(times=2.2), plain=plain) != ()

    @pytest.mark.parametrize(("step", "least"), [(1, 3e-5), (2, 1.5e-5)])
    def test_a_fused_optimizer_may_have_its_bias_corrections_in_fp32(self, step: int, least: float) -> None:
        found = training()

        def beside(error: float, *, short: bool) -> tuple[str, ...]:
            changed = tensor(UPDATE, "a", step, error)
            tensors = [
                changed if (one.kind, one.tensor, one.step) == (UPDATE, "a", step) else one for one in found.tensors
            ]
            return troubles(replace(found, tensors=tuple(tensors), short_scalars=short))

        assert beside(0.9 * least, short=True) == ()
        assert "update of a" in beside(0.9 * least, short=False)[0]
        assert "update of a" in beside(1.1 * least, short=True)[0]

    def test_a_direction_is_told_with_its_cosine(self, golden: Golden) -> None:
        wrong = replace(tensor(GRADIENT, "a", 1, 0.0), cosine=0.83, error=0.6)
        found = training()
        (line,) = troubles(replace(found, tensors=(wrong, *found.tensors[1:])))
        golden(line)

    def test_a_length_is_told_as_one(self, golden: Golden) -> None:
        long = TensorError(kind=GRADIENT, tensor="a", step=1, true_norm=1, norm=1.5, cosine=1.0, error=0.5)
        found = training()
        (line,) = troubles(replace(found, tensors=(long, *found.tensors[1:])))
        golden(line)

    def test_of_a_wrong_direction_and_a_wrong_length_the_larger_is_told(self) -> None:
        found = training()

        def told(norm: float, cosine: float) -> str:
            both = TensorError(kind=GRADIENT, tensor="a", step=1, true_norm=1, norm=norm, cosine=cosine, error=0.5)
            return troubles(replace(found, tensors=(both, *found.tensors[1:])))[0]

        assert "as it should be" in told(norm=1.5, cosine=0.995)
        assert "points elsewhere" in told(norm=1.05, cosine=0.9)

    def test_a_lost_gradient_and_one_that_is_no_number(self, golden: Golden) -> None:
        found = training()
        lost = tensor(GRADIENT, "a", 1, 1.0, norm=0.0)
        golden(troubles(replace(found, tensors=(lost, *found.tensors[1:])))[0])
        nan = replace(lost, norm=math.nan, error=math.nan, cosine=math.nan)
        golden(troubles(replace(found, tensors=(nan, *found.tensors[1:])))[0])

    def test_what_only_one_seed_shows_is_no_fault(self) -> None:
        flipped = training(2, gradients={"a": 1e-2})
        assert troubles(training(1), flipped, training(3)) == ()
        assert troubles(*(replace(flipped, seed=seed) for seed in (1, 2, 3))) != ()

    def test_a_seed_that_goes_over_an_edge_allows_nobody_else_to(self) -> None:
        spoilt = [*PLAIN[:3], *(training(seed, 1000.0) for seed in (4, 5))]
        assert troubles(training(gradients={"a": 1e-4}), plain=spoilt) != ()

    def test_a_gradient_below_one_rounding_of_all_of_them_is_not_told_from_zero(self) -> None:
        found, noise = training(), replace(tensor(GRADIENT, "bias", 1, 5e-9), true_norm=1e-9, norm=6e-9)
        plain = [replace(one, tensors=(*one.tensors, replace(noise, error=1e-12))) for one in PLAIN]
        assert troubles(replace(found, tensors=(*found.tensors, noise)), plain=plain) == ()

    def test_a_weight_that_moves_neither_as_it_is_nor_as_it_should_is_no_difference(self) -> None:
        plain = [replace(one, tensors=(*one.tensors, tensor(UPDATE, "still", 1, 1e-6))) for one in PLAIN]
        still = replace(tensor(UPDATE, "still", 1, 0.0), true_norm=0.0, norm=0.0)
        found = training()
        assert troubles(replace(found, tensors=(*found.tensors, still)), plain=plain) == ()

    def test_products_in_another_type_are_told_though_they_are_closer(self, golden: Golden) -> None:
        plain = [replace(one, form=OWN, product_types={"q_proj": "bfloat16"}) for one in PLAIN]
        (line,) = troubles(training(times=0.1, form=OWN), plain=plain)
        golden(line)

    def test_a_parameter_that_only_one_has(self, golden: Golden) -> None:
        (line,) = troubles(replace(training(), unknown=("lm_head.weight",)))
        golden(line)

    def test_a_loss_and_a_clipping_of_their_own(self, golden: Golden) -> None:
        found = replace(training(), losses=(7.1, 7.0), clipping_errors=(0.0, 3.0))
        loss, clipped = troubles(found)
        golden(loss)
        golden(clipped)

    def test_an_optimizer_that_rounds_its_states_may_do_so_from_the_second_step_on(self) -> None:
        short = [training(seed, 1e4, true_optimizer=False) for seed in range(1, 6)]
        plain = [*PLAIN, *short]
        found = training(true_optimizer=False)
        by_step = {
            step: replace(
                found,
                tensors=tuple(
                    replace(one, error=1e-2) if (one.kind, one.step) == (UPDATE, step) else one for one in found.tensors
                ),
            )
            for step in (1, 2)
        }
        assert any(line.startswith("update of") for line in troubles(by_step[1], plain=plain))
        assert not any(line.startswith("update of") for line in troubles(by_step[2], plain=plain))

    def test_lost_updates_are_a_note(self, golden: Golden) -> None:
        parity = judge_parity([replace(training(), lost_updates=0.2)], PLAIN)
        assert parity.troubles == ()
        golden(parity.notes)


class TestRecords:
    def test_they_cross_as_json(self) -> None:
        assert codec.read(TrainingErrors, json.loads(json.dumps(codec.plain(training())))) == training()

    def test_of_several_ranks_the_one_that_is_furthest_off_is_kept(self) -> None:
        far = training(gradients={"a": 0.5})
        one = merged_errors([training(), far])
        (worst,) = [each for each in one.tensors if (each.kind, each.tensor, each.step) == (GRADIENT, "a", 1)]
        assert (worst.error, worst.rank) == (0.5, 1)
        assert one.losses == training().losses


SPEC = TrainSpec(
    model="llama-3.2-1b", gpus=8, parallelism="fsdp", model_precision="fp32", liger=True, gradient_accumulation_steps=16
)


class TestSmall:
    @pytest.mark.parametrize("name", built_in_names())
    def test_each_model_keeps_its_kind(self, name: str) -> None:
        config = resolve(name).config
        few = small_config(config)
        assert few.keys() == config.keys()
        assert few["model_type"] == config["model_type"]
        assert few.get("head_dim") == config.get("head_dim")
        assert set(few.get("layer_types", ())) == set(config.get("layer_types", ()))
        assert not any(value for key, value in few.items() if key.endswith(("dropout", "_pdrop")))

    def test_heads_keep_their_size_and_still_share(self) -> None:
        few = small_config(resolve("llama-3.2-1b").config)
        wanted = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        assert [few[name] for name in wanted] == [2, 512, 8, 2, 64]
        assert (few["vocab_size"], few["bos_token_id"]) == (1024, None)

    def test_a_window_is_as_much_shorter_as_the_rows_are(self) -> None:
        assert small_config(resolve("gemma-3-270m").config, 0.1875)["sliding_window"] == 96

    def test_a_spec_keeps_what_shares_the_work(self) -> None:
        few = small(SPEC)
        assert (few.gpus, few.gradient_accumulation_steps, few.micro_batch_size) == (2, 2, 2)
        assert (few.parallelism, few.liger, few.sequence_length) == ("fsdp", True, 192)
        assert small(few) == few

    def test_its_plain_form_keeps_what_decides_what_is_learnt(self) -> None:
        spec = replace(SPEC, optimizer="adamw_torch_fused", gradient_checkpointing=True, attention="sdpa")
        plain = plainest(spec)
        assert plain.sequences_per_step == small(spec).sequences_per_step
        assert (plain.precision, plain.optimizer, plain.attention) == (spec.precision, "adamw_torch", "eager")
        assert plainest(plain) == plain
        assert plainest(replace(spec, optimizer="adamw_bnb_8bit")).optimizer == "adamw_bnb_8bit"

    def test_fsdp_under_mixed_precision_has_a_plain_form_of_its_own(self) -> None:
        assert gathered_precision(SPEC) == SPEC.mixed_precision != "no"
        assert gathered_precision(replace(SPEC, gpus=1, parallelism="ddp")) == "no"

    def test_attention_that_has_no_fp32_is_another_there(self) -> None:
        flash = TrainSpec(model="llama-tiny", attention="flash_attention_2", fp8="rowwise", sequence_length=64)
        found = in_fp32(small(flash))
        assert (found.attention, found.precision, found.fp8) == ("sdpa", "fp32", "no")

    def test_ranks_that_share_sequences_in_16_bits_have_batches_of_their_own_in_fp32(self) -> None:
        context = TrainSpec(model="llama-3.2-1b", mixed_precision="no", gpus=2, parallelism="context")
        few = small(context)
        found = in_fp32(few)
        assert (found.parallelism, found.precision) == ("fsdp", "fp32")
        assert found.sequences_per_step == few.sequences_per_step == plainest(context).sequences_per_step

    def test_an_optimizer_without_a_plain_form_says_so(self) -> None:
        assert true_optimizer(replace(SPEC, optimizer="paged_adamw_8bit")) == "adamw_torch"
        assert true_optimizer(replace(SPEC, optimizer="sgd")) == "sgd"
        assert true_optimizer(replace(SPEC, optimizer="lion_8bit")) == ""


def test_two_that_are_no_one_training_are_refused(golden: Golden) -> None:
    the_same_training(SPEC, replace(SPEC, gpus=1, parallelism="ddp", mixed_precision="bf16"))
    with pytest.raises(CaseFailedError) as raised:
        the_same_training(SPEC, replace(SPEC, optimizer="sgd"))
    golden(raised)
