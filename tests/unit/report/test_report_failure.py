"""What a failing test prints."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.records.launch import Environment, Launch, RankRecord
from pytest_llmperf.records.result import CaseResult, Check
from pytest_llmperf.report.failure_message import MAX_LINES, failure_message
from pytest_llmperf.support.formats import GIB
from tests.fakes import trace_of
from tests.golden import Golden

RERUN = "pytest 'perf_tests/test_ladder.py::test_rung[15.9]' --gpus 8"
ACCEPT = RERUN + ' --update-baselines --perf-reason "why"'


def launch_of(num_ranks: int = 1, steps: int = 40) -> Launch:
    ranks = tuple(
        RankRecord(
            rank=rank,
            host="node1",
            device="NVIDIA H200",
            tokens_per_step=37888,
            step_seconds=(0.5,) * steps,
            peak_reserved_bytes=52 * GIB + rank * GIB,
            peak_allocated_bytes=50 * GIB,
        )
        for rank in range(num_ranks)
    )
    environment = Environment(gpu="NVIDIA H200", driver="570", versions={}, variables={}, platform="Linux x86_64")
    return Launch(
        spec_id="x",
        digest="d",
        started_at="2026-01-01T00:00:00Z",
        wall_seconds=30,
        train_seconds=20,
        warmup_steps=8,
        parameters=1,
        losses=(1.0,) * steps,
        ranks=ranks,
        evidence={},
        environment=environment,
    )


REGRESSED = CaseResult(
    id="llama-3.2-1b-bf16-sdpa-liger-mbs37-gpus8",
    digest="d",
    nodeid="t.py::t",
    machine="h200",
    verdict="regressed",
    reason="tokens/s/GPU fell by 6.2 %, beyond its tolerance of 2.0 %",
    checks=(
        Check(
            metric="peak_reserved_bytes",
            value=59 * GIB,
            unit="bytes",
            baseline=58.95 * GIB,
            tolerance=0.01,
            limit=59.5395 * GIB,
            change=0.00085,
            detail="worst on rank 7 of 8 (node1, NVIDIA H200)",
            verdict="pass",
        ),
        Check(
            metric="tokens_per_second_per_gpu",
            value=67310.4,
            unit="tokens/s",
            baseline=71783.2,
            tolerance=0.02,
            limit=70347.5,
            change=-0.0623,
            detectable=0.011,
            verdict="regressed",
        ),
        Check(metric="mfu", value=0.53, unit="1"),
    ),
    launches=(launch_of(8), launch_of(8)),
    differences=("torch: 2.8.0 -> 2.9.1", "transformers: 4.57.1 -> 5.0.0"),
)


def test_a_regression_shows_figures_evidence_and_the_next_commands() -> None:
    assert failure_message(REGRESSED, RERUN, ACCEPT, "3 launches in 1 session, provisional").splitlines() == [
        f"{REGRESSED.id}: regressed: tokens/s/GPU fell by 6.2 %, beyond its tolerance of 2.0 %",
        "  metric         measured   baseline      limit  change  detectable",
        "  tokens/s/GPU     67,310     71,783     70,348  -6.2 %       1.1 %  regressed",
        "  peak memory   59.00 GiB  58.95 GiB  59.54 GiB  +0.1 %           -       pass",
        "  peak memory: worst on rank 7 of 8 (node1, NVIDIA H200)",
        "measured: 2 launches of 40 steps (8 of them warm-up); baseline: 3 launches in 1 session, provisional",
        "different from the baseline's environment:",
        "  torch: 2.8.0 -> 2.9.1",
        "  transformers: 4.57.1 -> 5.0.0",
        f"run it again: {RERUN}",
        f"accept it: {ACCEPT}",
    ]


POINTED = "+34.2 ms of a traced step: fused kernels gone: _rms_norm_* 66"


def test_what_traces_point_to_comes_before_the_loss_that_it_explains() -> None:
    header = failure_message(replace(REGRESSED, diagnosis=POINTED), RERUN, ACCEPT).splitlines()[0]
    assert header.endswith(f"regressed: {POINTED}; {REGRESSED.reason}")


def test_on_a_cpu_whose_times_are_noise_the_figure_comes_first() -> None:
    traced = tuple(replace(launch, trace=trace_of({"operator": {"aten::mm": 1}})) for launch in REGRESSED.launches)
    header = failure_message(replace(REGRESSED, diagnosis=POINTED, launches=traced), RERUN, ACCEPT).splitlines()[0]
    assert header.endswith(f"regressed: {REGRESSED.reason}; {POINTED}")


def on_a_cpu(result: CaseResult) -> CaseResult:
    traced = [replace(launch, trace=trace_of({"operator": {"aten::mm": 1}})) for launch in result.launches]
    return replace(result, launches=tuple(traced))


WAITED = Check(
    metric="synchronisations_per_step", value=3.0, unit="1", baseline=2.0, tolerance=0.0, limit=2.0, verdict="regressed"
)
RATE_LOST = "tokens_per_second_per_gpu 12,000 tokens/s, baseline 71,783 tokens/s, limit 17,946 tokens/s (-83.3 %)"
PLACE = "1 a step at train.py:61 (`loss.item()`)"
ON_A_CPU = f"a traced step on a CPU, whose times are noise: waits of the host: aten::item +1, {PLACE}"


def test_on_a_cpu_what_is_exact_comes_before_a_rate_that_is_noise(golden: Golden) -> None:
    reason = f"{RATE_LOST}, synchronisations_per_step 3, baseline 2, limit 2 (+50.0 %); {PLACE}; different: train.py"
    result = on_a_cpu(replace(REGRESSED, checks=(*REGRESSED.checks, WAITED), reason=reason, diagnosis=ON_A_CPU))
    golden(failure_message(result, RERUN, ACCEPT).splitlines()[0])
    # Of the exact ones alone nothing is before the verdict's own words.
    counted = replace(result, checks=(WAITED,), reason="synchronisations_per_step 3, baseline 2, limit 2 (+50.0 %)")
    golden(failure_message(counted, RERUN, ACCEPT).splitlines()[0])


def test_on_a_cpu_changes_that_lose_nothing_come_before_a_rate_that_is_noise(golden: Golden) -> None:
    changed = ("numerics changed at step 1: 12.178590 -> 12.180114",)
    checks = (*REGRESSED.checks, replace(WAITED, metric="kernels_per_step", verdict="changed"))
    result = on_a_cpu(replace(REGRESSED, checks=checks, reason=RATE_LOST, changed=changed))
    golden(failure_message(result, RERUN, ACCEPT).splitlines()[0])


def test_on_a_cpu_a_leak_comes_before_the_counts_that_it_changed() -> None:
    leak = replace(WAITED, metric="allocated_growth_bytes", unit="bytes", value=2e6, baseline=0.0, tolerance=0.01)
    checks = (*REGRESSED.checks, replace(WAITED, metric="kernels_per_step", verdict="changed"), leak)
    reason = f"{RATE_LOST}, allocated_growth_bytes 1.9 MiB, baseline 0 KiB, limit 64 KiB"
    result = on_a_cpu(replace(REGRESSED, checks=checks, reason=reason))
    header = failure_message(result, RERUN, ACCEPT).splitlines()[0]
    assert header.partition(": regressed: ")[2].startswith("allocated_growth_bytes 1.9 MiB")


def test_a_place_in_the_users_code_is_named_once(golden: Golden) -> None:
    told = f"waits of the host: aten::item +1, {PLACE}, 2 a step at a.py:3 (`f(a, b)`); unexplained 0.00 ms"
    result = replace(REGRESSED, reason=f"synchronisations_per_step 3, baseline 2; {PLACE}", diagnosis=told)
    golden(failure_message(result, RERUN, ACCEPT).splitlines()[0])


def test_an_exact_count_that_fails_comes_before_what_it_took(golden: Golden) -> None:
    count = Check(
        metric="graph_breaks", value=2.0, unit="1", baseline=0.0, tolerance=0.0, limit=0.0, verdict="regressed"
    )
    result = replace(REGRESSED, reason="graph_breaks 2", checks=(count,), diagnosis="-1.66 ms of a traced step")
    header = failure_message(result, RERUN, ACCEPT).splitlines()[0]
    golden(header)


def test_an_invalid_case_tells_its_step_after_the_evidence(golden: Golden) -> None:
    result = replace(REGRESSED, verdict="invalid", reason="asked for liger, nothing was patched", diagnosis=POINTED)
    first, second, *_ = failure_message(result, RERUN, "").splitlines()
    golden(first)
    golden(second)


def test_a_detail_of_the_judge_is_kept(golden: Golden) -> None:
    detailed = replace(REGRESSED, checks=(replace(REGRESSED.checks[0], detail="rank 3 on node2"),))
    message = failure_message(detailed, RERUN, ACCEPT, "1 launch in 1 session, provisional")
    golden(message)


def test_many_differences_are_counted() -> None:
    many = replace(REGRESSED, differences=tuple(f"package{n}: 1 -> 2" for n in range(20)))
    lines = failure_message(many, RERUN, ACCEPT).splitlines()
    assert lines.count("  ... and 16 more") == 1
    assert sum("package" in line for line in lines) == 4


def test_a_headline_has_its_first_causes_and_its_figure_and_a_line_below_has_the_rest() -> None:
    figure = "tokens_per_second_per_gpu 67,310, limit 70,347"
    causes = [f"cause {n}: {'x' * 120}" for n in range(7)]
    led = replace(REGRESSED, reason=figure, diagnosis="; ".join(causes))
    head, also, *_ = failure_message(led, RERUN, ACCEPT).splitlines()
    assert head.partition(": regressed: ")[2].split("; ") == [*causes[:2], figure, "and 5 more"]
    assert also == f"also: {'; '.join(causes[2:])}"
    short = failure_message(replace(led, diagnosis="; ".join(causes[:2])), RERUN, ACCEPT)
    assert "more" not in short.splitlines()[0]
    assert "also: " not in short


def test_a_new_case_shows_its_figures_and_how_to_record_them(golden: Golden) -> None:
    checks = tuple(
        replace(check, verdict="new", baseline=None, limit=None, change=None) for check in REGRESSED.checks[:2]
    )
    new = replace(REGRESSED, verdict="new", reason="no baseline on h200", checks=checks, differences=())
    golden(failure_message(new, RERUN, ACCEPT).splitlines())


def test_an_invalid_case_gives_each_reason_a_line_and_cannot_be_accepted() -> None:
    invalid = replace(
        REGRESSED,
        verdict="invalid",
        reason="Liger patched nothing; another process on GPU 0\nthe loss is NaN",
        differences=(),
    )
    assert failure_message(invalid, RERUN, ACCEPT, "3 launches in 1 session, provisional").splitlines() == [
        "llama-3.2-1b-bf16-sdpa-liger-mbs37-gpus8: invalid: Liger patched nothing",
        "  also: another process on GPU 0",
        "  also: the loss is NaN",
        "measured: 2 launches of 40 steps (8 of them warm-up); baseline: 3 launches in 1 session, provisional",
        f"run it again: {RERUN}",
    ]


def test_without_launches_there_is_still_a_message(golden: Golden) -> None:
    bare = replace(REGRESSED, checks=(), launches=(), differences=(), reason="")
    golden(failure_message(bare, "", "").splitlines()[1:])


WORDS = st.text(max_size=60)
FLOATS = st.floats(allow_nan=True)
MAYBE = st.none() | FLOATS
CHECKS = st.builds(
    Check,
    metric=st.sampled_from(["tokens_per_second_per_gpu", "peak_reserved_bytes", "mfu"]) | WORDS,
    value=FLOATS,
    unit=st.sampled_from(["tokens/s", "bytes", "s", "1", "J"]),
    baseline=MAYBE,
    tolerance=MAYBE,
    limit=MAYBE,
    change=MAYBE,
    detectable=MAYBE,
    verdict=st.none() | st.sampled_from(["pass", "regressed", "invalid", "odd"]),
    detail=WORDS,
)
RESULTS = st.builds(
    CaseResult,
    id=WORDS,
    digest=WORDS,
    nodeid=WORDS,
    machine=WORDS,
    verdict=st.sampled_from(["regressed", "new", "invalid", "improved", "inconclusive", "pass"]),
    reason=st.text("ab;\n ", max_size=200) | WORDS,
    checks=st.lists(CHECKS, max_size=12).map(tuple),
    launches=st.lists(st.builds(launch_of, st.integers(1, 9), st.integers(9, 40)), max_size=3).map(tuple),
    changed=st.lists(WORDS, max_size=20).map(tuple),
    differences=st.lists(WORDS, max_size=20).map(tuple),
    notes=st.lists(WORDS, max_size=5).map(tuple),
)


@given(RESULTS, WORDS, WORDS, WORDS)
def test_a_message_never_passes_its_limit(result: CaseResult, rerun: str, accept: str, baseline: str) -> None:
    lines = failure_message(result, rerun, accept, baseline).split("\n")
    assert len("\n".join(lines).splitlines()) <= MAX_LINES == 30
    assert all(line == line.rstrip() for line in lines)
    assert not any(line.startswith("accept it") for line in lines[1:] if result.verdict == "invalid")
