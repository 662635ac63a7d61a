"""The table at the end of a run."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.records.launch import Environment, Launch, RankRecord
from pytest_llmperf.records.result import USUAL, VERDICTS, CaseResult, Check, Reference, Spent, Verdict
from pytest_llmperf.report.summary_table import no_gate_of_speed, summary_lines
from pytest_llmperf.support.formats import GIB
from tests.examples import examples
from tests.golden import Golden

LONG_ID = "llama-3.2-1b-bf16-flash_attention_2-liger-compile-checkpointing-seq4096-mbs37-accum4-gpus32"
SOURCE = "EuroHPC course, chapter 15, MareNostrum 5 (H100 64 GB)"
LAUNCH = Launch(
    spec_id="x",
    digest="d",
    started_at="2026-01-01T00:00:00Z",
    wall_seconds=53.2,
    train_seconds=20,
    warmup_steps=1,
    parameters=1,
    losses=(1.0, 1.0),
    ranks=(
        RankRecord(
            rank=0,
            host="h",
            device="g",
            tokens_per_step=1,
            step_seconds=(1, 1),
            peak_reserved_bytes=1,
            peak_allocated_bytes=1,
        ),
    ),
    evidence={},
    environment=Environment(gpu="g", driver="", versions={}, variables={}, platform="p"),
)


def case(verdict: Verdict, spec_id: str = "llama-3.2-1b-bf16-sdpa-liger-mbs37-gpus1", **changes: object) -> CaseResult:
    """A case on a GPU with everything a row can show."""
    checks = (
        Check(metric="tokens_per_second_per_gpu", value=71783.4, unit="tokens/s", tolerance=0.02, change=-0.0618),
        Check(metric="peak_reserved_bytes", value=52.6 * GIB, unit="bytes", tolerance=0.01, change=0.0),
        Check(metric="mfu", value=0.571, unit="1"),
    )
    result = CaseResult(
        id=spec_id,
        digest="d",
        nodeid="t.py::t",
        machine="h200",
        verdict=verdict,
        reason=f"why {verdict}",
        checks=checks,
        launches=(LAUNCH,),
        reference=Reference(source=SOURCE, tokens_per_second_per_gpu=48081, peak_reserved_bytes=62.3 * GIB),
        rung="15.9",
    )
    return replace(result, **changes)  # type: ignore[arg-type]


def uncolored(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


def test_a_wide_table_has_a_line_for_each_case_as_they_ran(golden: Golden) -> None:
    results = [case("regressed", "llama-bf16-sdpa-liger"), case("pass", "a")]
    spent = Spent(launches=2, phases={"other": 106.4})
    golden(summary_lines(results, None, color=False, spent=spent))


def test_a_case_of_several_tests_counts_once_by_its_worst_verdict_as_exports_have_it(golden: Golden) -> None:
    results = [case("new", "a"), case("pass", "a"), case("pass", "b")]
    *_, counts, hint = summary_lines(results, None, color=False)
    golden(counts)
    golden(hint)


def test_what_passes_and_is_not_as_it_was_says_what_its_step_does(golden: Golden) -> None:
    result = case("changed", diagnosis="-1.9 ms of a traced step: the optimizer's step is one tensor at a time")
    (line,) = [line for line in summary_lines([result], None, color=False) if ": changed: " in line]
    golden(line)


def test_columns_with_nothing_to_show_are_left_out() -> None:
    checks = (
        Check(metric="tokens_per_second_per_gpu", value=812.2, unit="tokens/s"),
        Check(metric="peak_reserved_bytes", value=300 * 2**20, unit="bytes"),
    )
    lines = summary_lines([case("new", "tiny", checks=checks, reference=None, rung="")], None, color=False)
    assert [line.split() for line in lines[:2]] == [
        ["case", "tokens/s/GPU", "memory", "verdict"],
        ["tiny", "812", "300", "MiB", "new"],
    ]


def test_a_published_out_of_memory_is_said(golden: Golden) -> None:
    reference = Reference(source=SOURCE, tokens_per_second_per_gpu=None, peak_reserved_bytes=64 * GIB)
    lines = summary_lines([case("pass", reference=reference, rung="15.2")], None, color=False)
    golden(lines[1])


def test_a_case_without_figures_keeps_its_row() -> None:
    lines = summary_lines([case("pass"), case("invalid", "broken", checks=(), launches=())], None, color=False)
    assert re.split(r"  +", lines[2])[:7] == ["broken", "-", "-", "-", "-", "-", "invalid"]


def test_without_a_terminal_nothing_is_folded_or_cut() -> None:
    lines = summary_lines([case("pass", LONG_ID * 5, updated="recorded " + "x " * 300)], None, color=False)
    assert lines[1].startswith(LONG_ID * 5 + "  ")
    assert "recorded " + ("x " * 300).strip() in [line.strip() for line in lines]


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("color", [False, True])
def test_a_narrow_terminal_folds_the_id_and_keeps_every_figure(width: int, color: bool) -> None:
    lines = [uncolored(line) for line in summary_lines([case("regressed", LONG_ID)], width, color=color)]
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)
    assert all(
        figure in text
        for figure in ("71,783", "-6.2 %", "52.6 GiB", "0.0 %", "57.1 %", "regressed", "48,081 · 62.3 GiB")
    )
    # In the order of the text: the id's pieces, each at the start of its line.
    assert LONG_ID in "".join(line.split("  ")[0] for line in lines if not line.startswith(" "))


def test_eighty_columns_keep_a_table(golden: Golden) -> None:
    lines = summary_lines([case("regressed"), case("pass", "a")], 80, color=False)
    golden(lines[:5])


def test_where_no_table_fits_its_rows_are_folded(golden: Golden) -> None:
    golden(summary_lines([case("regressed")], 50, color=False)[:4])


def test_colors_are_the_verdicts_own() -> None:
    codes = {"pass": 32, "improved": 36, "changed": 36, "new": 33, "inconclusive": 33, "regressed": 31, "invalid": 31}
    for width in (None, 120, 80):
        for verdict in VERDICTS:
            text = "\n".join(summary_lines([case(verdict)], width, color=True))
            assert f"\x1b[{codes[verdict]}m{verdict}\x1b[0m" in re.sub(r" +\x1b", "\x1b", text), (width, verdict)


@pytest.mark.parametrize("variable", ["NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM"])
@pytest.mark.parametrize("color", [False, True])
def test_the_environment_changes_nothing(monkeypatch: pytest.MonkeyPatch, variable: str, color: bool) -> None:
    expected = summary_lines([case("pass")], None, color=color)
    monkeypatch.setenv(variable, {"COLUMNS": "20", "TERM": "dumb"}.get(variable, "1"))
    assert summary_lines([case("pass")], None, color=color) == expected
    assert color == any("\x1b" in line for line in expected)


def test_markup_in_an_id_is_text() -> None:
    assert summary_lines([case("pass", "[red]a[/red] :smile:")], None, color=False)[1].startswith(
        "[red]a[/red] :smile:  "
    )


def test_an_ascii_terminal_gets_ascii() -> None:
    results = [case("pass", "modèle", updated="tokens/s 1 → 2"), case("improved", reason="schneller als früher")]
    for width in (None, 80, 30):
        lines = summary_lines(results, width, color=False, encoding="ascii")
        assert all(line.isascii() for line in lines)
    assert "48,081 | 62.3 GiB (15.9)" in summary_lines(results, None, color=False, encoding="ascii")[1]


def test_what_was_recorded_is_shown_below_and_keeps_its_indent() -> None:
    named = case("pass", "a", updated="a: recorded\n  tokens/s  1 -> 2\n")
    lines = summary_lines([named, case("pass", "b", updated="tokens/s 3")], None, color=False)
    assert lines[4:8] == ["a: recorded", "  tokens/s  1 -> 2", "recorded b", "  tokens/s 3"]


def test_new_cases_share_one_hint(golden: Golden) -> None:
    golden(summary_lines([case("new", name) for name in "abc"], None, color=False)[-1])


def test_what_is_changed_and_passes_says_how_it_fails(golden: Golden) -> None:
    changed = case("pass", changed=("losses differ from step 3 on",))
    golden(summary_lines([changed], None, color=False)[-1])
    both = [changed, case("changed", "tiny"), case("regressed", "other", changed=("losses differ",))]
    golden(summary_lines(both, None, color=False)[-1])


def test_what_was_spent_stands_beside_the_verdicts(golden: Golden) -> None:
    spent = Spent(launches=1, phases={"other": 53.2})
    golden(summary_lines([case("pass")], None, color=False, spent=spent)[-1])
    assert summary_lines([case("pass")], None, color=False)[-1] == "1 pass"


def test_a_verdict_that_fails_no_test_says_why_here(golden: Golden) -> None:
    lines = summary_lines([case("improved", "a"), case("inconclusive", "b"), case("pass", "c")], None, color=False)
    golden(lines[5:7])
    assert lines[7] == "1 pass, 1 improved, 1 inconclusive"


def test_many_sources_are_not_all_listed(golden: Golden) -> None:
    references = [Reference(source=f"table {n}", tokens_per_second_per_gpu=1.0) for n in range(5)]
    lines = summary_lines([case("pass", reference=reference) for reference in references], None, color=False)
    golden(lines)


def test_rich_is_not_loaded_before_a_table_is_drawn() -> None:
    code = "import sys, pytest_llmperf.report.summary_table as _; print('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_no_results_are_no_lines() -> None:
    assert summary_lines([], 80, color=True) == []


IDS = st.text("abcdefgh0123456789.-_", min_size=1, max_size=120)
FIGURES = st.floats(allow_nan=True, allow_infinity=True)


def test_what_has_many_causes_shows_the_first_and_all_when_verbose() -> None:
    reason = "; ".join(f"cause {n}: {'x' * 120}" for n in range(7))
    one = case("inconclusive", "a", reason=reason)
    short, whole = (summary_lines([one], None, color=False, verbose=verbose) for verbose in (False, True))
    (line,) = (line for line in short if "cause" in line)
    assert line.removeprefix("a: inconclusive: ").split("; ") == [*reason.split("; ")[:3], "and 4 more (-v)"]
    assert f"a: inconclusive: {reason}" in whole


@examples(80)
@given(
    st.lists(st.tuples(IDS, st.sampled_from((*VERDICTS, "inconclusive")), FIGURES, FIGURES), min_size=1, max_size=4),
    st.integers(10, 140),
    st.booleans(),
)
def test_any_width_loses_no_id_and_no_line_is_too_long(
    rows: list[tuple[str, Verdict, float, float]], width: int, color: bool
) -> None:
    results = [
        case(
            verdict,
            name,
            checks=(Check(metric="tokens_per_second_per_gpu", value=value, unit="tokens/s", change=change),),
        )
        for name, verdict, value, change in rows
    ]
    lines = [uncolored(line) for line in summary_lines(results, width, color=color)]
    assert all(len(line) <= width and line == line.rstrip() for line in lines)
    first = "".join(re.split(r"  +", line)[0] for line in lines if not line.startswith(" "))
    assert all(name in first for name, *_ in rows)


def test_a_note_that_several_cases_have_is_said_once(golden: Golden) -> None:
    results = [
        case("pass", name, notes=("the steps have two speeds", *more)) for name, more in (("a", ("own",)), ("b", ()))
    ]
    lines = summary_lines([*results, case("pass", "c")], None, color=False)
    golden([line for line in lines if "two speeds" in line])
    assert "a: own" in lines


def test_a_note_that_means_no_fault_is_there_where_all_is_asked_for() -> None:
    note = f"step times are bimodal (noise or a periodic task); {USUAL}"
    results = [case("pass", "a", notes=(note, "own"))]
    assert f"a: {note}" not in summary_lines(results, None, color=False)
    assert {f"a: {note}", "a: own"} <= {*summary_lines(results, None, color=False, verbose=True)}


def test_notes_that_differ_by_a_figure_are_one_with_its_range_and_who_has_most_of_it(golden: Golden) -> None:
    lost = "slow steps lost {} % of a launch"
    results = [case("pass", name, notes=(lost.format(share),)) for name, share in (("a", 1.1), ("b", 17.4), ("c", 9.0))]
    kept = [
        case("pass", name, notes=(f"{part} tensors did not change",))
        for name, part in (("d", "5 of 20"), ("e", "9 of 24"))
    ]
    named = [
        case("pass", name, notes=(f"rank {rank} is waited for, torch 2.{rank}",)) for name, rank in (("f", 1), ("g", 2))
    ]
    lines = summary_lines([*results, *kept, *named], None, color=False)
    golden(lines)


def test_notes_that_tell_a_range_themselves_are_not_one(golden: Golden) -> None:
    notes = {
        "a": "peak memory of its launches: 3.10 GiB to 3.20 GiB",
        "b": "peak memory of its launches: 40 GiB to 41 GiB",
    }
    results = [case("pass", name, notes=(note,)) for name, note in notes.items()]
    lines = summary_lines([*results, case("pass", "c", notes=(notes["b"],))], None, color=False)
    golden(lines)


@pytest.mark.parametrize(("limit", "told"), [(1.0, "4"), (0.1137, "8.8"), (1 / 152, "150")])
def test_how_much_slower_still_passes_is_a_number_that_people_write(limit: float, told: str) -> None:
    rate = Check(metric="tokens_per_second_per_gpu", value=1.0, unit="1/s", baseline=1.0, tolerance=3.0, limit=limit)
    assert f"at least {told} times slower" in no_gate_of_speed([rate])


def test_where_speed_is_no_gate_nothing_says_what_it_would_detect() -> None:
    def lines_of(tolerance: float) -> list[str]:
        rate = Check(
            metric="tokens_per_second_per_gpu", value=812.0, unit="tokens/s", tolerance=tolerance, detectable=0.769
        )
        return summary_lines([case("pass", "a", checks=(rate,))], None, color=False)

    assert "detectable" in lines_of(0.3)[0]
    assert not [line for line in lines_of(3.0) if "detectable" in line or "76.9" in line]


def test_what_two_tests_recorded_of_one_training_is_told_once() -> None:
    results = [
        case("new", "a", nodeid=nodeid, updated="recorded a (1 launch)\n  new  7") for nodeid in ("t::x", "t::y")
    ]
    lines = summary_lines(results, None, color=False)
    assert lines.count("recorded a (1 launch)") == 1


def test_what_a_host_has_otherwise_is_told_of_what_is_not_as_it_was() -> None:
    lines = ("torch: 2.0 -> 2.1", "OMP_NUM_THREADS: 1 -> 2", "einops: none -> 0.8.2", "numpy: 1.26 -> 2.0")
    told = {
        name: [line for line in summary_lines([one], None, color=False, verbose=name == "verbose") if " -> " in line]
        for name, one in {
            "pass": case("pass", differences=lines),
            "changed": case("pass", differences=lines, changed=("loss",)),
            "regressed": case("regressed", differences=lines),
            "verbose": case("pass", differences=lines),
        }.items()
    }
    assert {name: len(each) for name, each in told.items()} == {"pass": 2, "changed": 4, "regressed": 4, "verbose": 4}
    assert [line.split(": ")[1] for line in told["pass"]] == ["torch", "numpy"]
