"""Spaces of configurations: what is in them, what cannot be and why, and files that say them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.settings import liger
from pytest_llmperf.settings import space as spaces
from pytest_llmperf.settings.setting import Axis
from pytest_llmperf.settings.space import ScriptSpace, Space, axes_of, default_axes, read_axes
from pytest_llmperf.settings.train_spec import SpecError, TrainSpec, known_failure
from tests.golden import Golden

TINY = TrainSpec(model="llama-tiny", micro_batch_size=8)


def test_a_space_is_every_combination_of_its_choices_its_own_spec_first() -> None:
    space = Space(TINY, axes_of({"micro_batch_size": [2, 8], "attention": ["eager", "sdpa"]}))
    found = space.candidates()
    assert found.specs[0] == TINY
    assert {(spec.micro_batch_size, spec.attention) for spec in found.specs} == {
        (size, attention) for size in (2, 8) for attention in ("eager", "sdpa")
    }
    assert (space.size, found.unseen, found.refused) == (4, 0, {})


def test_what_cannot_be_is_counted_by_its_reason_without_the_id(golden: Golden) -> None:
    axes = axes_of({"torch_compile": [False, True], "torch_compile_scope": ["model", "layers"]})
    found = Space(TINY, axes).candidates()
    assert len(found.specs) == 3
    golden(found.refused)


def test_of_a_large_space_a_sample_is_looked_at_with_all_nearest_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces, "MOST", 60)
    space = Space(TINY, axes_of({"micro_batch_size": list(range(1, 41)), "seed": list(range(50))}))
    found = space.candidates()
    nearest = {TINY, *space.neighbours(TINY)}
    assert (len(nearest), len(found.specs), found.unseen) == (89, 89, 2000 - 89)
    assert set(found.specs) == nearest
    monkeypatch.setattr(spaces, "MOST", 100)
    found = space.candidates()
    assert (len(found.specs), found.unseen) == (100, 1900)
    assert nearest < set(found.specs)
    assert found.specs == space.candidates().specs


def test_neighbours_differ_by_one_choice_and_can_be() -> None:
    axes = axes_of({"attention": ["sdpa", "eager"], "sdpa_backend": ["auto", "math"], "micro_batch_size": [8, 4]})
    space = Space(TINY, axes)
    assert set(space.neighbours(TINY)) == {
        replace(TINY, attention="eager"),
        replace(TINY, sdpa_backend="math"),
        replace(TINY, micro_batch_size=4),
    }
    assert set(space.neighbours(replace(TINY, sdpa_backend="math"))) == {
        TINY,
        replace(TINY, sdpa_backend="math", micro_batch_size=4),
    }


def test_what_cannot_be_at_all_is_told_from_what_clashes_with_the_rest() -> None:
    """Rows want a text, and a scope a compiler; no attention is called ``sdqa``."""
    axes = {"rows": ["packed", "padded"], "torch_compile_scope": ["model", "layers"], "attention": ["sdpa", "sdqa"]}
    space = Space(TINY, axes_of(axes))
    named = [line.partition(" cannot be: ")[0] for line in space.no_neighbours(TINY)]
    assert named == ["rows=padded", "torch_compile_scope=layers", "attention=sdqa"]
    (wrong,) = space.no_neighbours(TINY, at_all=True)
    assert wrong.startswith(named[2])


def test_two_axes_of_one_field_and_an_empty_axis_are_refused(golden: Golden) -> None:
    with pytest.raises(SpecError, match="both set seed"):
        Space(TINY, (Axis.over("seed", [1]), Axis.of("other", {"one": {"seed": 2}})))
    with pytest.raises(SpecError) as raised:
        Space(TINY, (Axis("seed", ()),))
    golden(raised)


class TestDefaultAxes:
    def test_a_gpu_has_all_that_makes_training_faster_and_a_cpu_what_it_can(self) -> None:
        def names(*, on_cpu: bool) -> dict[str, int]:
            return {axis.name: len(axis.choices) for axis in default_axes(TINY, on_cpu=on_cpu)}

        assert set(names(on_cpu=False)) - set(names(on_cpu=True)) == {"liger"}
        assert names(on_cpu=False)["liger"] == 7  # off, all, without each of four, and the loss alone
        assert names(on_cpu=True)["attention"] == 2

    def test_a_precision_changes_only_where_it_is_allowed(self, golden: Golden) -> None:
        assert "precision" not in {axis.name for axis in default_axes(TINY, on_cpu=False)}
        (axis,) = (
            axis for axis in default_axes(TINY, on_cpu=False, allowed=["fp8", "bf16-pure"]) if axis.name == "precision"
        )
        assert [choice.name for choice in axis.choices] == [
            "bf16",
            "fp8 tensorwise",
            "fp8 rowwise",
            "fp8 rowwise_with_gw_hp",
            "bf16-pure",
        ]
        with pytest.raises(SpecError) as raised:
            default_axes(TINY, on_cpu=False, allowed=["fp9"])
        golden(raised)

    def test_an_optimizer_of_another_arithmetic_only_where_it_is_allowed(self) -> None:
        def optimizers(*allowed: str) -> list[str]:
            found = [axis for axis in default_axes(TINY, on_cpu=False, allowed=allowed) if axis.name == "optimizer"]
            return [choice.name for choice in found[0].choices]

        assert optimizers() == ["adamw_torch", "adamw_torch_fused"]
        assert optimizers("adamw_torch_8bit") == ["adamw_torch", "adamw_torch_fused", "adamw_torch_8bit"]

    def test_what_somebody_fixed_stays_with_all_that_is_decided_with_it(self) -> None:
        names = {axis.name for axis in default_axes(TINY, on_cpu=False, fixed=["sdpa_backend", "micro_batch_size"])}
        assert "attention" not in names
        assert "micro-batch" not in names

    def test_a_global_batch_is_reached_by_accumulation(self, golden: Golden) -> None:
        two = replace(TINY, gpus=2)
        (axis,) = (axis for axis in default_axes(two, on_cpu=True, global_batch=24) if axis.name == "micro-batch")
        specs = [Space(two, (axis,)).spec([choice]) for choice in axis.choices]
        assert {spec.sequences_per_step for spec in specs} == {24}
        assert [spec.micro_batch_size for spec in specs] == [1, 2, 3, 4, 6, 12]
        with pytest.raises(SpecError) as raised:
            default_axes(two, on_cpu=True, global_batch=25)
        golden(raised)
        with pytest.raises(SpecError) as raised:
            default_axes(two, on_cpu=True, fixed=["micro_batch_size"], global_batch=24)
        golden(raised)

    def test_each_choice_can_be_named_again(self) -> None:
        space = Space(TINY, default_axes(TINY, on_cpu=True))
        spec = replace(TINY, torch_compile=True, torch_compile_scope="layers", micro_batch_size=2)
        assert space.choices_of(spec) == {
            "attention": "sdpa",
            "compile": "layers",
            "optimizer": "adamw_torch",
            "checkpointing": "none",
            "micro-batch": "2",
        }


class TestFile:
    def test_fields_and_choices_of_several_fields(self, tmp_path: Path) -> None:
        path = tmp_path / "space.toml"
        path.write_text(
            "[axes]\nmicro_batch_size = [2, 4]\nprecision = ['bf16', 'fp32']\n"
            "[axes.loss]\nplain = { liger = false }\nfused = { liger = true, liger_kernels = 'rope' }\n"
        )
        space = Space(TINY, read_axes(path))
        assert space.size == 8
        assert {spec.precision for spec in space.candidates().specs} == {"bf16", "fp32"}
        assert {spec.liger_kernels for spec in space.candidates().specs if spec.liger} == {"rope"}

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "it is empty"),
            ("axes = 3", "a space needs axes"),
            ("[axis]\nseed = [1]", "unknown 'axis'"),
            ("[axes]\nmicro_batch = [1]", "no field 'micro_batch' (did you mean 'micro_batch_size'"),
            ("[axes]\nseed = 1", "axis 'seed' is 1, expected a list"),
            ("[axes]\nseed = []", "expected a list of values"),
            ("[axes]\nmodel = ['a']", "sets the model"),
            ("[axes.mine]\noff = 3", "each choice sets fields"),
            ("[axes]\nprecision = ['fp9']", "unknown precision 'fp9'"),
            ("[axes\n", "expected TOML, e.g. [axes] and below it micro_batch_size = [8, 16]: correct it"),
            ("[axes.liger]\n", "axis 'liger' has no choice"),
            ("[axes]\nseed = [1, 2, 1]", "axis 'seed' has 1 twice"),
            ("[axes]\nprecision = ['bf16', 'bf16']", "axis 'precision' has 'bf16' twice"),
            ("[axes]\nsteps = [5, 9]", "axis 'steps' sets steps, expected what is trained"),
        ],
    )
    def test_what_is_wrong_is_said_in_one_line_with_the_file(self, tmp_path: Path, text: str, said: str) -> None:
        path = tmp_path / "space.toml"
        path.write_text(text)
        with pytest.raises(SpecError) as caught:
            read_axes(path)
        assert said in str(caught.value)
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)

    def test_a_file_that_is_not_there(self, tmp_path: Path, golden: Golden) -> None:
        with pytest.raises(SpecError) as raised:
            read_axes(tmp_path / "none.toml")
        golden(raised)

    def test_a_folder_that_is_named_as_one(self, tmp_path: Path) -> None:
        with pytest.raises(SpecError, match="name a file"):
            read_axes(tmp_path)


def _recipes_of(model: str) -> list[TrainSpec]:
    base = TrainSpec(model=model, micro_batch_size=8)
    space = Space(base, default_axes(base, on_cpu=False))
    assert {spec for sizes in space.recipes() for spec in sizes} <= {*space.candidates().specs}
    found = list[TrainSpec]()
    for sizes in space.recipes():
        alike = dict.fromkeys(replace(spec, micro_batch_size=8) for spec in sizes)
        largest_first = [32, 24, 16, 12, 8, 6, 4, 3, 2, 1]
        assert [*sizes] == [replace(spec, micro_batch_size=size) for spec in alike for size in largest_first]
        found += alike
    return found


#: As the sources of Liger say it: of one family nothing fuses the loss.
_PATCHES = """
def apply_liger_kernel_to_llama(
    rope: bool = True,
    fused_linear_cross_entropy: bool = True,
    model: PreTrainedModel = None,
) -> None: ...


def apply_liger_kernel_to_granite(
    rope: bool = True, cross_entropy: bool = True, fused_linear_cross_entropy: bool = False, rms_norm: bool = True
) -> None: ...


def apply_liger_kernel_to_nemotron(relu_squared: bool = True, fused_linear_cross_entropy: bool = True) -> None: ...


MODEL_TYPE_TO_APPLY_LIGER_FN = {
    "llama": apply_liger_kernel_to_llama,
    "granite": apply_liger_kernel_to_granite,
    "nemotron": apply_liger_kernel_to_nemotron,
}
"""


class TestInstalledLiger:
    """What Liger replaces is what its own source says of the family."""

    @pytest.fixture(autouse=True)
    def installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        package = tmp_path / "liger_kernel"
        (package / "transformers").mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "transformers" / "monkey_patch.py").write_text(_PATCHES, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "liger_kernel", raising=False)
        liger._installed.cache_clear()
        yield
        liger._installed.cache_clear()

    @staticmethod
    def choices(model: str) -> list[str]:
        base = TrainSpec(model=model, sequence_length=64)
        found = [axis for axis in default_axes(base, on_cpu=False) if axis.name == "liger"]
        return [choice.name for axis in found for choice in axis.choices]

    @staticmethod
    def config_of(folder: Path, family: str) -> str:
        path = folder / f"{family}.json"
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
        path.write_text(json.dumps({"model_type": family, **sizes}), encoding="utf-8")
        return str(path)

    def test_a_family_without_kernels_is_never_tried_with_them(self) -> None:
        assert self.choices("opt-1.3b") == []
        failure = known_failure(TrainSpec(model="opt-1.3b", liger=True))
        assert failure is not None
        assert failure.endswith(" for opt")
        assert known_failure(TrainSpec(model="llama-tiny", liger=True)) is None

    def test_what_a_family_has_not_is_no_choice_and_in_no_recipe(self, tmp_path: Path) -> None:
        model = self.config_of(tmp_path, "granite")
        without = ["without rope", "without rms_norm", "without cross_entropy"]
        assert self.choices(model) == ["off", "all", *without]
        base = TrainSpec(model=model, sequence_length=64)
        (first, *_), (compiled, *_) = Space(base, default_axes(base, on_cpu=False)).recipes()
        assert (first.liger, first.torch_compile) == (True, False)
        assert (compiled.liger, compiled.torch_compile) == (False, True)

    def test_what_is_left_without_its_only_kernel_is_none(self, tmp_path: Path) -> None:
        assert self.choices(self.config_of(tmp_path, "nemotron")) == ["off", "all", "fused_linear_cross_entropy alone"]


def test_recipes_of_a_model_with_kernels_are_liger_and_a_compiler_with_its_loss_alone() -> None:
    base = TrainSpec(model="llama-3.2-1b", micro_batch_size=8, optimizer="adamw_torch_fused", liger=True)
    loss = "fused_linear_cross_entropy"
    compiled = replace(base, torch_compile=True, torch_compile_scope="layers", liger_kernels=loss)
    assert _recipes_of("llama-3.2-1b") == [base, compiled]


def test_a_model_without_kernels_has_the_compilers_recipes_of_which_one_fuses_the_loss() -> None:
    base = TrainSpec(model="opt-1.3b", micro_batch_size=8, optimizer="adamw_torch_fused", torch_compile=True)
    layers, whole = (replace(base, torch_compile_scope=scope) for scope in ("layers", "model"))
    assert _recipes_of("opt-1.3b") == [layers, replace(whole, attention="flash_attention_2"), whole]


def test_recipes_are_followed_beside_all_else_that_a_spec_has() -> None:
    base = TrainSpec(model="opt-1.3b", micro_batch_size=8)
    space = Space(base, default_axes(base, on_cpu=False, allowed=["bf16-pure"]))
    best = replace(base, micro_batch_size=48, mixed_precision="no", sdpa_backend="flash")
    _, whole = space.recipes(best)
    fused = replace(best, torch_compile=True, optimizer="adamw_torch_fused")
    assert whole[0] == replace(fused, sdpa_backend="auto", attention="flash_attention_2", micro_batch_size=96)
    assert [spec.micro_batch_size for spec in whole[:3]] == [96, 64, 48]
    layers = replace(fused, torch_compile_scope="layers")
    assert space.recipes(layers)[0] == (layers,)
    own = replace(fused, torch_compile_scope="model", sdpa_backend="auto")
    behind = space.recipes(own)[1]
    assert {spec.attention for spec in behind[: behind.index(own)]} == {"flash_attention_2"}


def test_what_only_other_choices_of_an_axis_set_is_left_out_where_it_contradicts_one() -> None:
    base = TrainSpec(model="llama-3.2-1b", micro_batch_size=8)
    compiled = {"no": {"torch_compile": False}, "model": {"torch_compile": True, "torch_compile_scope": "model"}}
    whole = replace(base, torch_compile=True, torch_compile_scope="model")
    assert [*Space(whole, axes_of({"compile": compiled})).neighbours(whole)] == [base]
    adapters = {"off": {"lora": False}, "r64": {"lora": True, "lora_rank": 64}}
    few = {"few": {"lora": True, "lora_rank": 64, "micro_batch_size": 4}}
    begins = replace(base, lora=True, lora_rank=64)
    neighbours = [*Space(begins, axes_of({"adapters": adapters | few})).neighbours(begins)]
    assert neighbours == [base, replace(begins, micro_batch_size=4)]


def test_a_compiler_is_tried_without_kernels_where_the_loss_cannot_be_had_alone() -> None:
    base = TrainSpec(model="llama-3.2-1b", micro_batch_size=8)
    axes = {"liger": [False, True], "compile": {"no": {"torch_compile": False}, "layers": {"torch_compile": True}}}
    own, (compiled,) = Space(base, axes_of(axes)).recipes()[0], Space(base, axes_of(axes)).recipes()[1]
    assert own == (replace(base, liger=True),)
    assert compiled == replace(base, torch_compile=True)


def test_shards_come_with_the_weights_that_they_keep_where_precision_is_no_axis() -> None:
    base = TrainSpec(model="llama-3.2-1b", gpus=2)
    weights = {}
    for allowed in ((), ("bf16-mixed",)):
        (axis,) = (one for one in default_axes(base, on_cpu=False, allowed=allowed) if one.name == "parallelism")
        weights[allowed] = {one.name: dict(one.fields).get("model_precision") for one in axis.choices}
    assert weights == {(): {"ddp": "bf16", "fsdp": "fp32"}, ("bf16-mixed",): {"ddp": None, "fsdp": None}}


def test_a_recipe_follows_what_a_space_of_ones_own_has() -> None:
    base = TrainSpec(model="llama-3.2-1b", micro_batch_size=8)
    optimizers = {"optimizer": ["adamw_torch", "adamw_torch_fused"]}
    assert Space(base, axes_of(optimizers)).recipes() == ((replace(base, optimizer="adamw_torch_fused"),),) * 2
    assert not any(Space(base, axes_of({"attention": ["sdpa", "eager"]})).recipes())


class TestWordsOfACommand:
    def _read(self, folder: Path, axes: str, command: str = "python train.py {batch} {n} {flag}", **told: Any) -> Any:
        (folder / "axes.toml").write_text(axes)
        return ScriptSpace.read({"command": command, **told}, folder / "axes.toml", folder)

    def test_each_word_is_filled_in_and_the_micro_batch_is_a_field(self, tmp_path: Path) -> None:
        axes = 'batch = [4, 8]\nn = [1, 2]\nflag = ["", "--a --b"]\n[start]\nn = 2\n'
        space = self._read(tmp_path, axes)
        found = space.candidates().specs
        assert found[0] == space.first
        assert (found[0].argv, found[0].micro_batch_size) == (["python", "train.py", "4", "2"], 4)
        assert {tuple(spec.argv[2:]) for spec in found} == {
            (size, n, *flag) for size in ("4", "8") for n in ("1", "2") for flag in ((), ("--a", "--b"))
        }
        last = next(spec for spec in found if spec.argv[2:] == ["8", "1", "--a", "--b"])
        assert space.choices_of(last) == {"batch": "8", "n": "1", "flag": "--a --b"}

    def test_numbers_in_order_are_a_scale(self, tmp_path: Path) -> None:
        axes = "batch = [4, 8]\nn = [8, 2, 1.5]\nflag = [3, 1, 2]\n"
        assert self._read(tmp_path, axes).scales == {"batch": ["4", "8"], "n": ["8", "2", "1.5"]}

    def test_tokens_that_are_told_grow_with_the_micro_batch(self, tmp_path: Path) -> None:
        axes = 'batch = [4, 8]\nn = [1]\nflag = [""]\n'
        assert [spec.tokens for spec in self._read(tmp_path, axes, tokens=64).candidates().specs] == [64, 128]
        found = self._read(tmp_path, axes, tokens="sequences:4").candidates().specs
        assert [spec.tokens for spec in found] == ["sequences:4", "sequences:8"]

    def test_a_word_that_is_the_micro_batch_may_have_any_name(self, tmp_path: Path) -> None:
        space = self._read(tmp_path, 'micro_batch = "n"\n[axes]\nbatch = [4]\nn = [1, 2]\nflag = [true]\n')
        assert [spec.micro_batch_size for spec in space.candidates().specs] == [1, 2]
        assert space.first.argv[2:] == ["4", "1", "true"]

    def test_a_list_that_is_called_as_the_key_is_an_axis(self, tmp_path: Path) -> None:
        space = self._read(tmp_path, "micro_batch = [1, 2]\n", "python train.py {micro_batch}")
        assert [spec.micro_batch_size for spec in space.candidates().specs] == [1, 2]

    def test_a_micro_batch_that_is_no_number_is_refused_with_its_reason(self, tmp_path: Path) -> None:
        space = self._read(tmp_path, "batch = [4, '8']\n", "python train.py {batch}", tokens=64)
        found = space.candidates()
        assert [spec.micro_batch_size for spec in found.specs] == [4]
        assert found.refused == {"micro_batch_size='8', expected a whole number of at least 1": 1}

    def test_gpus_and_braces_of_its_own_stay(self, tmp_path: Path) -> None:
        command = "torchrun --nproc-per-node {gpus} train.py {{batch}} {micro_batch_size}"
        space = self._read(tmp_path, "micro_batch_size = [1, 2]\n", command, gpus=2)
        assert space.first.argv == ["torchrun", "--nproc-per-node", "2", "train.py", "{batch}", "1"]
