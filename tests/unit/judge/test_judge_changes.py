"""What is exact: evidence and losses against a baseline's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf import TrainSpec
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.exact import changed_evidence, changes
from pytest_llmperf.judge.repeats import changed_losses, first_loss_checks
from pytest_llmperf.judge.store import parse, text_of
from pytest_llmperf.records.calibration import Health
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.settings.registry import lost
from pytest_llmperf.support import codec
from tests.fakes import ENVIRONMENT, Fake, launch_of
from tests.golden import Golden
from tests.shelf import accept

SPEC = TrainSpec(model="llama-tiny", steps=8, min_steps=8, warmup_steps=2)
SETUP = {"samples": "by index", "dropout": {}, "hooks": {}, "torch": {"threads": 1}, "config": {"hidden_act": "silu"}}
BASELINES = Path(__file__).parents[3] / "baselines"


def launch(*, losses: tuple[float, ...] = (), versions: dict[str, str] | None = None, **evidence: Any) -> Launch:
    setup = {**SETUP, **evidence.pop("setup", {})}
    made = launch_of(SPEC, Fake(evidence={"setup": setup, **evidence}, versions=versions or {}))
    return replace(made, losses=losses or made.losses)


def on_a_gpu(one: Launch, **evidence: Any) -> Launch:
    environment = replace(ENVIRONMENT, gpu="NVIDIA H200", driver="580")
    return replace(one, environment=environment, evidence={**one.evidence, **evidence})


class TestEvidence:
    @pytest.mark.parametrize(
        ("setup", "said"),
        [
            ({"dropout": {"Dropout.p": 0.1}}, "dropout Dropout.p: none -> 0.1"),
            ({"hooks": {"forward_hooks": 3}}, "hooks forward_hooks: none -> 3"),
            ({"config": {"hidden_act": "gelu"}}, "config hidden_act: silu -> gelu"),
            ({"config": {}}, "config hidden_act: silu -> none"),
            ({"torch": {"threads": 4}}, "torch threads: 1 -> 4"),
        ],
    )
    def test_any_fact_that_is_another_is_told(self, setup: dict[str, Any], said: str) -> None:
        assert changes([launch(setup=setup)], [launch()]) == (said,)

    def test_how_a_launch_began_and_why_it_ended_is_no_fact_of_the_training(self) -> None:
        assert changes([launch(start="warm", ended="decided")], [launch(start="cold")]) == ()

    def test_what_is_ours_may_move_to_another_module(self) -> None:
        then, now, other = (
            launch(setup={"callbacks": f"{owner}.StepMarks transformers.trainer_callback.DefaultFlowCallback"})
            for owner in ("pytest_llmperf.worker.train", "pytest_llmperf.worker.step_marks", "mine.pytest_llmperf_too")
        )
        assert changes([now], [then]) == ()
        assert changes([other], [then]) != ()

    @pytest.mark.parametrize(
        ("then", "now", "is_told"),
        [
            ({"f": "fla"}, {"f": "transformers"}, True),
            ({"f": "fla"}, {}, True),
            ({"f": "transformers"}, {}, False),
            ({"f": "none"}, {"f": "transformers"}, False),
            ({"f": "false", "g": "none"}, {"g": "none"}, False),
            ({"g": "none"}, {"f": "false", "g": "none"}, False),
            ({"f": "true"}, {"f": "false"}, True),
        ],
    )
    def test_an_upgrade_explains_no_lost_kernel_package(
        self, then: dict[str, str], now: dict[str, str], is_told: bool
    ) -> None:
        old = launch(setup={"functions": then}, versions={"transformers": "5.22"})
        new = launch(setup={"functions": now}, versions={"transformers": "5.23"})
        assert any("functions f" in line for line in changed_evidence([new], [old])) is is_told

    def test_another_power_limit_is_different_where_both_are_known(self, golden: Golden) -> None:
        high, low, unknown = (replace(launch(), health=Health(power_limit_watts=each)) for each in (700.0, 450.0, 0.0))
        golden(low.differences(high))
        assert high.differences(high) == high.differences(unknown) == unknown.differences(high) == ()

    def test_what_a_launch_forces_is_different_as_it_was_found(self, golden: Golden) -> None:
        then, now = (launch(found={"matmul_precision": each}) for each in ("highest", "high"))
        assert changes([now], [then]) == ()
        golden(then.differences(now))
        assert launch().differences(now) == ()

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_what_exchanges_alone_read_is_no_difference_of_one_rank(self, ranks: int) -> None:
        old = replace(launch(), ranks=launch().ranks * ranks)
        variables = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "OMP_NUM_THREADS": "2"}
        now = replace(old, environment=replace(old.environment, variables={**old.environment.variables, **variables}))
        told = {line.partition(":")[0] for line in old.differences(now)}
        assert told == (variables.keys() if ranks > 1 else {"OMP_NUM_THREADS"})

    def test_what_else_was_loaded_differs_where_both_tell(self) -> None:
        old = launch()
        then, now = (
            replace(old, environment=replace(old.environment, loaded=loaded))
            for loaded in ({"causal-conv1d": "1.6.0", "tqdm": "4"}, {"tqdm": "4", "a.pth": "12ab"})
        )
        assert then.differences(now) == ("a.pth: none -> 12ab", "causal-conv1d: 1.6.0 -> none")
        assert old.differences(now) == then.differences(old) == ()
        assert "loaded" not in codec.plain(old)["environment"]
        assert codec.read(Launch, codec.plain(now)) == now

    def test_each_line_is_told_once(self) -> None:
        odd = launch(liger_modules=3)
        assert changes([launch(), odd, odd], [launch()]) == ("liger_modules: 0 -> 3",)

    def test_what_some_stored_launch_had_is_no_change(self) -> None:
        assert changes([launch(liger_modules=3)], [launch(liger_modules=3), launch()]) == ()

    @pytest.mark.parametrize(
        ("then", "now", "is_told"),
        [("0.1", "0.1 x24", False), ("0.1", "0.2 x24", True), ("0.1 x24", "0.1 x23", True), ("0.1 x24", "0.1", False)],
    )
    def test_how_often_dropout_is_there_is_compared_where_both_tell(self, then: str, now: str, is_told: bool) -> None:
        old, new = (launch(setup={"dropout": {"Dropout.p": p}}) for p in (then, now))
        assert bool(changes([new], [old])) is is_told

    def test_what_old_records_do_not_tell_of_is_not_compared(self) -> None:
        old = replace(launch(), evidence={"attention": "sdpa"})
        assert changes([launch(setup={"dropout": {"Dropout.p": 0.1}})], [old]) == ()
        # But what the newer ones among them tell of is.
        assert changes([launch(setup={"hooks": {"a": 1}})], [old, launch()]) == ("hooks a: none -> 1",)

    def test_what_could_not_be_seen_is_no_change(self) -> None:
        assert changes([launch(attention_kernel="unknown")], [launch(attention_kernel="a")]) == ()
        assert changes([launch(attention_kernel="a")], [launch(attention_kernel="unknown")]) == ()

    def test_nothing_has_changed_where_there_is_nothing(self) -> None:
        assert changes([launch()], []) == ()

    def test_a_file_changes_nothing(self) -> None:
        stored = launch(setup={"optimizer": {"lr": 1 / 3, "betas": (0.9, 0.999)}})
        read = replace(
            stored, evidence=json.loads(json.dumps(dict(stored.evidence)), parse_float=lambda d: float(d[:8]))
        )
        assert changes([stored], [read]) == ()

    def test_a_long_value_is_cut(self) -> None:
        (line,) = changes([launch(liger_note="x" * 500)], [launch()])
        assert len(line) < 200


def test_where_a_scheduler_put_the_ranks_is_a_circumstance_and_no_change() -> None:
    before = launch(slurm_nodes="n1", ranks_per_node="1")
    after = launch(slurm_nodes="n3", ranks_per_node="1")
    assert changes([after], [before]) == ()
    assert before.differences(after) == ("slurm_nodes: n1 -> n3",)
    assert before.differences(launch()) == (), "a launch outside of SLURM has no such place"


def test_another_spread_of_the_ranks_is_a_change() -> None:
    apart, together = launch(ranks_per_node="1"), launch(ranks_per_node="2")
    assert changes([together], [apart]) == ("ranks_per_node: 1 -> 2",)
    assert changes([together], [launch()]) == (), "a baseline from outside of SLURM does not tell"


class TestVersions:
    PATCHED: ClassVar = {"sources": {"transformers.trainer": "1"}}

    def test_a_file_that_was_patched_is_told(self) -> None:
        then = launch(setup={"sources": {"transformers.trainer": "0"}})
        assert changes([launch(setup=self.PATCHED)], [then]) == ("sources transformers.trainer: 0 -> 1",)

    def test_one_of_another_version_is_explained_by_it(self) -> None:
        then = launch(setup={"sources": {"transformers.trainer": "0"}}, versions={"transformers": "5.17.0"})
        assert changes([launch(setup=self.PATCHED, versions={"transformers": "5.23.0"})], [then]) == ()

    def test_the_users_own_file_is_explained_by_none(self) -> None:
        then = launch(setup={"sources": {"sitecustomize": "0"}}, versions={"transformers": "5.17.0"})
        now = launch(setup={"sources": {"sitecustomize": "1"}}, versions={"transformers": "5.23.0"})
        assert changes([now], [then]) == ("sources sitecustomize: 0 -> 1",)
        gone = launch(setup={"sources": {}}, versions={"transformers": "5.23.0"})
        assert changes([gone], [then]) == ("sources sitecustomize: 0 -> none",)

    def test_a_key_of_the_configuration_that_an_upgrade_brings_is_none(self, golden: Golden) -> None:
        then = launch(versions={"transformers": "5.17.0"})
        new = {"config": {"hidden_act": "silu", "added": 1}}
        assert changes([launch(setup=new, versions={"transformers": "5.23.0"})], [then]) == ()
        assert changes([launch(setup=new, versions={"transformers": "5.17.0"})], [then]) == ("config added: none -> 1",)
        # A default that it turns round is one, also where there was none.
        window = [{"config": {"hidden_act": "silu", "window": value}} for value in (None, 4096)]
        then_none = launch(setup=window[0], versions={"transformers": "5.17.0"})
        now_some = launch(setup=window[1], versions={"transformers": "5.23.0"})
        assert changes([now_some], [then_none]) == ("config window: none -> 4096",)
        other = launch(setup={"config": {"hidden_act": "gelu"}}, versions={"transformers": "5.23.0"})
        golden(changes([other], [then]))

    def test_a_decorator_that_an_upgrade_brings_is_none_and_somebody_elses_is(self) -> None:
        then = launch(setup={"step": {"A.forward": "transformers.a"}}, versions={"transformers": "5.17.0"})
        for outermost, is_told in (("transformers.b", False), ("mine", True)):
            chain = f"{outermost} > transformers.a"
            now = launch(setup={"step": {"A.forward": chain}}, versions={"transformers": "5.23.0"})
            assert changes([now], [then]) == (f"step A.forward: transformers.a -> {chain}",) * is_told

    def test_another_commit_of_the_same_version_is_told(self) -> None:
        a, b = (launch(versions={"accelerate": f"1.15.0 @{commit}"}) for commit in ("aaa", "bbb"))
        assert changed_evidence([b], [a]) == ("accelerate: 1.15.0 @aaa -> 1.15.0 @bbb",)
        assert changed_evidence([launch(versions={"accelerate": "1.16.0"})], [a]) == ()


class TestAttentionKernel:
    FUSED, MATH = "aten._scaled_dot_product_x_attention.default", "aten._scaled_dot_product_attention_math.default"

    def lost(self, now: Launch, then: str = FUSED) -> str | None:
        return next(lost(SPEC, [now.seen], [launch(attention_kernel=then).seen], frozenset()), None)

    @pytest.mark.parametrize("now", ["", MATH])
    def test_a_fused_one_is_lost(self, now: str) -> None:
        line = self.lost(launch(attention_kernel=now))
        assert line is not None
        assert f"{self.FUSED} -> {now or 'plain matrix products'}" in line

    @pytest.mark.parametrize("now", ["unknown", FUSED, "aten._scaled_dot_product_y_attention.default"])
    def test_another_fused_one_or_nothing_seen_is_no_loss(self, now: str) -> None:
        assert self.lost(launch(attention_kernel=now)) is None

    def test_what_never_was_cannot_be_lost(self) -> None:
        assert self.lost(launch(attention_kernel=""), then=self.MATH) is None

    def test_eager_attention_has_none_to_lose(self) -> None:
        assert self.lost(launch(attention="eager", attention_kernel="")) is None

    def test_one_that_is_asked_for_by_its_name_is_its_checks_matter(self) -> None:
        now, then = launch(attention_kernel="").seen, launch(attention_kernel=self.FUSED).seen
        spec = TrainSpec(model="llama-tiny", sequence_length=64)
        assert len([*lost(spec, [now], [then], frozenset())]) == 1
        assert not [*lost(replace(spec, sdpa_backend="flash"), [now], [then], frozenset())]
        assert not [*lost(spec, [now], [then], frozenset({"attention"}))]


class TestExperts:
    GROUPED, FALLBACK = "aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"

    def lost(self, now: str, **setting: str) -> list[str]:
        spec = TrainSpec(model="mixtral-tiny", sequence_length=64, **setting)  # type: ignore[arg-type]
        seen = [launch(experts="grouped_mm", experts_kernel=kernel).seen for kernel in (now, self.GROUPED)]
        return [*lost(spec, seen[:1], seen[1:], frozenset())]

    def test_grouped_products_that_nobody_asked_for_are_lost(self) -> None:
        (line,) = self.lost(self.FALLBACK)
        assert f"they ran by {self.FALLBACK}" in line

    def test_what_runs_as_before_or_was_asked_for_is_not(self) -> None:
        assert self.lost(self.GROUPED) == self.lost("unknown") == self.lost("aten.mm.default", experts="eager") == []


class TestLosses:
    LOSSES = tuple(6.2 + 0.01 * step for step in range(8))

    def moved(self, step: int, by: float) -> tuple[float, ...]:
        return tuple(loss + by * (index == step - 1) for index, loss in enumerate(self.LOSSES))

    def test_the_first_is_exact(self, golden: Golden) -> None:
        then = launch(losses=(12.178589820861816, *self.LOSSES[1:]))
        now = launch(losses=(12.180113792419434, *self.LOSSES[1:]))
        golden(list(changed_losses([now], [then])))

    def test_one_unit_in_the_last_place_of_float32_is_told(self, golden: Golden) -> None:
        then, now = launch(losses=(12.178589820861816,)), launch(losses=(12.178590774536133,))
        golden(list(changed_losses([now], [then])))

    def test_what_a_file_rounds_is_none(self) -> None:
        then, now = launch(losses=(float("12.1785898"),)), launch(losses=(12.178589820861816,))
        assert not list(changed_losses([now], [then]))

    @pytest.mark.parametrize(
        ("factor", "versions", "stored", "fails"),
        [
            (2.0, {}, (6.2,), True),
            (0.5, {}, (6.2,), True),
            (1.002, {}, (6.2,), True),
            (1.0005, {}, (6.2,), False),
            (1.002, {}, (6.2, 6.202), False),
            (1.002, {"torch": "9.9"}, (6.2,), False),
            (2.0, {"torch": "9.9"}, (6.2,), True),
        ],
    )
    def test_a_first_loss_far_from_the_baselines_fails(
        self, factor: float, versions: dict[str, str], stored: tuple[float, ...], fails: bool
    ) -> None:
        then = [launch(losses=(loss,), versions={"torch": "2.0"}) for loss in stored]
        now = launch(losses=(stored[0] * factor,), versions={"torch": "2.0", **versions})
        checks = first_loss_checks([now], then, 2)
        assert [check.verdict for check in checks] == ["regressed"] * fails
        if factor in (2.0, 0.5):
            assert "gradient_accumulation_steps" in checks[0].detail

    def test_a_ratio_that_accumulation_and_ranks_share_names_both(self, golden: Golden) -> None:
        two = launch(losses=(12.4,))
        two = replace(two, ranks=(two.ranks[0], replace(two.ranks[0], rank=1)))
        told = [first_loss_checks([now], [launch(losses=(6.2,))], 2)[0].detail for now in (launch(losses=(12.4,)), two)]
        golden(told[0])
        golden(told[1])

    def test_a_first_loss_of_other_data_or_hardware_is_not_held(self) -> None:
        then, now = launch(losses=(6.2,)), launch(losses=(12.4,), setup={"samples": "shuffled"})
        assert first_loss_checks([now], [then], 2) == ()
        assert first_loss_checks([on_a_gpu(launch(losses=(12.4,)))], [then], 2) == ()

    @pytest.mark.parametrize(("by", "is_told"), [(0.004, False), (0.006, True)])
    def test_later_ones_may_differ_on_a_gpu_by_what_was_seen(self, by: float, is_told: bool) -> None:
        now, then = (on_a_gpu(launch(losses=losses)) for losses in (self.moved(5, by), self.LOSSES))
        assert [line.partition(":")[0] for line in changed_losses([now], [then])] == [
            "numerics changed at step 5"
        ] * is_told

    @pytest.mark.parametrize(("by", "is_told"), [(3e-5, False), (3e-4, True)])
    def test_what_is_compiled_may_begin_a_little_apart(self, by: float, is_told: bool) -> None:
        now, then = (on_a_gpu(launch(losses=each), compiled_graphs=3) for each in (self.moved(1, by), self.LOSSES))
        assert bool(list(changed_losses([now], [then]))) == is_told

    def test_fp8_may_differ_by_more(self) -> None:
        now, then = (on_a_gpu(launch(losses=each), fp8_modules=9) for each in (self.moved(5, 0.012), self.LOSSES))
        assert not list(changed_losses([now], [then]))

    def test_a_cpus_are_exact_to_the_end(self) -> None:
        now, then = launch(losses=self.moved(8, 1e-4)), launch(losses=self.LOSSES)
        assert len(list(changed_losses([now], [then]))) == 1

    def test_a_training_that_scatters_is_given_that(self) -> None:
        known = [launch(losses=self.LOSSES), launch(losses=self.moved(4, 0.001))]
        assert not list(changed_losses([launch(losses=self.moved(4, 0.003))], known))
        assert list(changed_losses([launch(losses=self.moved(4, 0.005))], known))

    def test_of_several_first_losses_it_is_one_of_them(self) -> None:
        known = [launch(losses=self.LOSSES), launch(losses=self.moved(1, 0.001))]
        assert not list(changed_losses([known[0], known[1]], known))
        assert list(changed_losses([launch(losses=self.moved(1, 0.0005))], known))

    def test_what_is_compiled_on_a_cpu_goes_on_as_far_apart_as_it_began(self) -> None:
        apart = tuple(loss + 5e-5 for loss in self.LOSSES)
        now, then = (launch(losses=each, torch_compile=True) for each in (apart, self.LOSSES))
        assert not list(changed_losses([now], [then]))

    @pytest.mark.parametrize("setup", [{"samples": "shuffled"}, {"torch": {"threads": 2}}])
    def test_other_samples_and_other_hardware_are_not_compared(self, setup: dict[str, Any]) -> None:
        now = launch(losses=self.moved(1, 1.0), setup=setup)
        assert not list(changed_losses([now], [launch(losses=self.LOSSES)]))

    def test_old_records_are_not_compared(self) -> None:
        then = replace(launch(losses=self.LOSSES), evidence={})
        assert not list(changed_losses([launch(losses=self.moved(1, 1.0))], [then]))
        assert not list(changed_losses([then], [launch(losses=self.moved(1, 1.0))]))

    @given(st.integers(1, 8), st.integers(1, 8))
    def test_how_long_one_measures_changes_nothing(self, mine: int, theirs: int) -> None:
        now, then = launch(losses=self.LOSSES[:mine]), launch(losses=self.LOSSES[:theirs])
        assert not list(changed_losses([now], [then]))


def _peft(one: Launch) -> str | None:
    return one.environment.loaded.get("peft")


class TestStoredLaunches:
    """The false alarms of both, over what is committed: there must be none."""

    @pytest.mark.parametrize("path", sorted(BASELINES.glob("*/*/*.json")), ids=lambda path: path.stem)
    def test_no_launch_differs_from_those_before_it(self, path: Path) -> None:
        baseline = parse(Baseline, path.read_text(), path.name)
        for number, now in enumerate(baseline.launches):
            # Another peft replaces other functions.
            before = [each for each in baseline.launches[:number] if _peft(each) == _peft(now)]
            assert not before or changes([now], before) == ()


def test_a_baseline_keeps_the_setup_once_and_the_losses_to_the_digit() -> None:
    one = launch(losses=(12.178589820861816,) * 8)
    baseline = accept(
        None, judged=None, spec=SPEC, machine="m", launches=[one, one], verdict="new", checks=[], reason="r",
        recorded_at="2026-01-01T00:00:00Z", recorded_by="t",
    )  # fmt: skip
    text = text_of(baseline)
    assert text.count('"hidden_act"') == 1
    read = parse(Baseline, text, "file")
    assert read.launches[0].evidence["setup"] == one.evidence["setup"]
    assert read.launches[0].losses[0] == 12.1785898
    assert text_of(read) == text
    assert changes([one], read.launches) == ()
