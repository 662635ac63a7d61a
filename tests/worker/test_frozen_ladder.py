"""The suite's ladder, really trained on the CPU: the form of its results and all in them that is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.golden import Golden
from tests.worker import user

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

#: By keys that are said as they are; of others the kind of value alone, as a machine's speed and versions move them.
_EXACT = frozenset(
    "attention autocast_dtype device_type digest global_batch id liger_modules linear_modules metric nodeid optimizer "
    "optimizer_fused parallelism parameter_dtypes parameters rung schema spec_id tf32 tokens_per_step torch_compile "
    "unit verdict warmup_steps world_size".split()
)
#: Of these the kind alone: what is installed, which operators a processor has, and what a busy machine is told of.
_OF_THE_MACHINE = frozenset(
    "diagnosis health loaded notes places python remarks rows sources variables versions".split()
)


def test_it_writes_results_of_this_form(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "perf_tests").symlink_to(user.REPOSITORY / "perf_tests")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\npythonpath = .\n")
    case = ("perf_tests/test_ladder.py", "-k", "llama-tiny-bf16-sdpa-seq64-mbs7 or opt-tiny-bf16-sdpa-seq64-mbs6")
    golden.check_json("ladder.json", form_of(user.run(tmp_path, *case)))


def form_of(value: Any, name: str = "") -> Any:
    """Keys, kinds and what is exact."""
    if name in _OF_THE_MACHINE:
        return type(value).__name__
    if name.endswith("_per_step") and isinstance(value, dict):
        return value
    if isinstance(value, dict):
        return {key: form_of(each, key) for key, each in value.items()}
    if name in _EXACT:
        return value
    if isinstance(value, list):  # A launch that a busy machine spoilt is repeated; the last one counts.
        return [form_of(each) for each in (value if name in ("results", "ranks") else value[-1:])]
    return type(value).__name__
