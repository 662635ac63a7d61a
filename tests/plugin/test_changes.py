"""What is exact and not as in the baseline: told in every verdict, accepted with a reason alone."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

import pytest

from tests.golden import Golden
from tests.plugin.conftest import Project

SETUP = {
    "samples": "by index",
    "dropout": {},
    "attention_function": "transformers.integrations.sdpa_attention.sdpa_attention_forward",
    "sources": {"transformers.models.llama.modeling_llama": "97296b66ed59"},
}
FUSED = "aten._scaled_dot_product_flash_attention_for_cpu.default"

DROPOUT = {"setup": {**SETUP, "dropout": {"LlamaAttention.attention_dropout": 0.3}}}
PATCHED = {"setup": {**SETUP, "sources": {"transformers.models.llama.modeling_llama": "000000000000"}}}


@pytest.mark.parametrize(
    ("fake", "said"),
    [
        ({"evidence": DROPOUT}, "dropout LlamaAttention.attention_dropout: none -> 0.3"),
        ({"evidence": PATCHED}, "sources transformers.models.llama.modeling_llama: 97296b66ed59 -> 000000000000"),
        ({"loss": 6.0001}, "numerics changed at step 1: 6.000000 -> 6.000100"),
        (
            {"versions": {"accelerate": "1.15.0 @1a2b3c4d5e6f"}},
            "accelerate: 1.15.0 @000000000000 -> 1.15.0 @1a2b3c4d5e6f",
        ),
    ],
)
class TestAPassThatIsNotAsBefore:
    BEFORE: ClassVar = {"evidence": {"setup": SETUP}, "versions": {"accelerate": "1.15.0 @000000000000"}}

    def changed(self, project: Project, fake: dict[str, Any]) -> None:
        project.record(**self.BEFORE)
        project.fake(**{**self.BEFORE, **fake})

    def test_it_passes_and_says_so(self, project: Project, fake: dict[str, Any], said: str, golden: Golden) -> None:
        self.changed(project, fake)
        result = project.run("--perf-json=out.json")
        result.assert_outcomes(passed=2)
        golden.lines(result.stdout, "changed since the")
        assert len(re.findall("pass, changed", result.stdout.str())) == 2
        assert [each["changed"] for each in json.loads((project.path / "out.json").read_text())["results"]] == [
            [said]
        ] * 2

    def test_a_strict_run_fails(self, project: Project, fake: dict[str, Any], said: str, golden: Golden) -> None:
        self.changed(project, fake)
        result = project.run("--perf-strict", "-k", "sdpa")
        result.assert_outcomes(failed=1, deselected=1)
        golden.lines(result.stdout, "pass, which --perf-strict fails: changed", "accept it:")

    def test_it_is_recorded_with_a_reason_alone_and_is_then_as_before(
        self, project: Project, fake: dict[str, Any], said: str, golden: Golden
    ) -> None:
        self.changed(project, fake)
        refused = project.run("--update-baselines", "-k", "sdpa")
        refused.assert_outcomes(failed=1, deselected=1)
        golden.lines(refused.stdout, "changed since the")
        accepted = project.run("--update-baselines", "--perf-reason=upgrade", "-k", "sdpa")
        accepted.assert_outcomes(passed=1, deselected=1)
        accepted.stdout.fnmatch_lines(["*pass, changed, recorded*"])
        golden.lines(accepted.stdout, "changed since the")
        assert "changed" not in project.run("--perf-strict", "-k", "sdpa").stdout.str()


def test_what_is_as_before_says_nothing(project: Project) -> None:
    project.record(evidence={"setup": SETUP})
    result = project.run("--perf-strict")
    result.assert_outcomes(passed=2)
    assert "changed" not in result.stdout.str()
    assert "different" not in result.stdout.str()


def test_another_environment_is_told_once_and_fails_nothing(project: Project, golden: Golden) -> None:
    project.record()
    project.fake(versions={"torch": "2.1"})
    result = project.run("--perf-strict")
    result.assert_outcomes(passed=2)
    golden.lines(result.stdout, "different from the")


def test_a_fused_kernel_that_the_baseline_had_is_not_lost_on_a_cpu_either(project: Project, golden: Golden) -> None:
    project.record(by={"sdpa": {"evidence": {"attention_kernel": FUSED}}})
    project.fake(evidence={"attention_kernel": ""})
    result = project.run("--update-baselines", "--perf-reason=upgrade", "-k", "sdpa")
    result.assert_outcomes(failed=1, deselected=1)
    golden.lines(result.stdout, ": invalid: asked")


def test_what_one_side_of_a_turn_does_otherwise_is_told(project: Project, golden: Golden) -> None:
    old = project.path / "old-python"
    old.write_text('#!/bin/sh\nexec python3 "$@"\n')
    old.chmod(0o755)
    project.fake(evidence={"setup": SETUP}, by={"old-python": {"evidence": DROPOUT, "loss": 6.5}})
    result = project.run(f"--perf-against={old}", "-k", "sdpa")
    golden.lines(result.stdout, "not the same")
