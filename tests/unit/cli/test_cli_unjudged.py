"""What a night's files say together of the tests that none of them has judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.cli import night_results, night_tests
from pytest_llmperf.cli.night_tests import LeftOut, last_word, left_out, pytest_line
from pytest_llmperf.records.results_document import document_of
from tests.golden import Golden
from tests.unit.cli.test_cli_submit import result, write

LOG = """\
llmperf: 2 GPU(s): begins
ERROR: usage: of the first start
llmperf: 2 GPU(s): exit code 4
llmperf: 2 GPU(s): begins
=== test session starts ===
ERROR test_a.py - SyntaxError: invalid syntax
!!!! Interrupted: 1 error during collection !!!!
=== 1 error in 0.10s ===
llmperf: 2 GPU(s): exit code 2
llmperf: 1 GPU(s): begins
=== 3 deselected in 0.10s ===
llmperf: 1 GPU(s): exit code 5
"""


def suite(width: int | None, *nodes: str, said: dict[str, str] | None = None, strict: bool = True) -> dict[str, Any]:
    coverage = {"nodes": list(nodes), "parts": [], "gaps": [], "said": said or {}}
    return {
        "perf_width": width,
        "strict": strict,
        "rootdir": "/none",
        "baselines": "/none/baselines",
        "digests": [],
        "coverage": coverage,
    }


def plan(folder: Path, **widths: int) -> None:
    """A night whose plan has a test of each name."""
    planned = [{"id": name, "nodeid": name, "width": width} for name, width in widths.items()]
    write(folder, 0, planned=planned, suite=suite(None, *widths, said=dict.fromkeys(widths, "all")))
    (folder / "gpus-0.json").rename(folder / "plan.json")


def test_a_width_that_met_its_time_limit_names_what_it_did_not_judge(tmp_path: Path, golden: Golden) -> None:
    plan(tmp_path, a=2, b=2, c=1)
    ran = suite(2, "a", "b", said={"a": "all"})
    write(tmp_path, 2, result("a"), unfinished="SIGUSR1", exit_code=75, suite=ran)
    night = night_results.gather([tmp_path], ["gpus-2.json", "gpus-1.json"])
    golden(night.troubles)


def test_a_test_that_every_width_left_to_others_is_named(tmp_path: Path, golden: Golden) -> None:
    elsewhere = {"id": "x", "nodeid": "a", "width": 1, "reason": "x: of 1", "elsewhere": "test"}
    write(tmp_path, 2, suite=suite(2, "a", said={"a": "stopped"}), skipped=[elsewhere])
    write(tmp_path, 1, suite=suite(1, "a", "b", said={}))
    night = night_results.gather([tmp_path], [])
    golden(night.troubles)


def test_what_one_width_skipped_for_its_package_is_no_gap(tmp_path: Path) -> None:
    here = {"id": "x", "nodeid": "a", "width": 2, "reason": "no Liger", "elsewhere": ""}
    other = {**here, "reason": "of 2", "elsewhere": "test"}
    write(tmp_path, 2, result("b"), suite=suite(2, "a", "b", said={"a": "stopped", "b": "all"}), skipped=[here])
    write(tmp_path, 1, result("c"), suite=suite(1, "a", "c", said={"a": "stopped", "c": "all"}), skipped=[other])
    assert night_results.gather([tmp_path], []).troubles == ()


def test_a_width_that_no_test_asks_for_is_told_so(tmp_path: Path, golden: Golden) -> None:
    plan(tmp_path, a=2)
    write(tmp_path, 2, result("a"), suite=suite(2, "a", said={"a": "all"}))
    write(tmp_path, 4, exit_code=5, suite=suite(4))
    (line,) = night_results.gather([tmp_path], []).troubles
    golden(line)


@pytest.mark.parametrize(
    ("width", "said"),
    [
        ("2", "test_a.py - SyntaxError: invalid syntax"),
        ("1", "3 deselected"),
        ("8", ""),
    ],
)
def test_pytests_own_line_is_of_the_last_start_of_that_width(width: str, said: str) -> None:
    assert pytest_line(LOG, width) == said


def test_an_exit_code_comes_with_pytests_line_and_the_log(tmp_path: Path, golden: Golden) -> None:
    log = tmp_path / "night-7.log"
    log.write_text(LOG)
    (tmp_path / "gpus-2.exit").write_text(f"4\n{log}\n")
    (tmp_path / "gpus-1.exit").write_text(f"5\n{log}\n")
    write(tmp_path, 1, exit_code=5)
    night = night_results.gather([tmp_path], ["gpus-2.json"])
    golden(night.troubles)


def test_a_log_without_a_word_of_pytest_says_nothing() -> None:
    assert last_word("Segmentation fault\n") == ""


def test_what_is_no_pass_says_where_it_ran_and_what_was_otherwise(tmp_path: Path, golden: Golden) -> None:
    launch = {"evidence": {"slurm_nodes": "n2"}}
    slow = {**result("a", "regressed", -0.1), "launches": [launch], "differences": ["PYTHONPATH: none -> /mine"]}
    write(tmp_path, 1, slow, {**result("b"), "launches": [launch]}, exit_code=1)
    page = night_results.gather([tmp_path], []).page()
    (row,) = [line for line in page if line.startswith("| a ")]
    golden(row)
    (row,) = [line for line in page if line.startswith("| b ")]
    assert "n2" not in row


def test_tests_that_a_night_is_without_are_noted_and_not_missed(tmp_path: Path, golden: Golden) -> None:
    plan(tmp_path, a=1, b=4, c=8, d=3)
    write(tmp_path, 1, result("a"), suite=suite(1, "a", said={"a": "all"}))
    write(tmp_path, 4, result("b"), suite=suite(4, "b", said={"b": "all"}))
    night = night_results.gather([tmp_path], [], LeftOut(wider=True))
    golden(night.troubles)
    golden(night.notes)
    assert night_results.gather([tmp_path], [], LeftOut(frozenset({3, 8}))).troubles == ()


@pytest.mark.parametrize(("words", "found"), [("", LeftOut()), ("8 wider", LeftOut(frozenset({8}), True)), ("0", None)])
def test_what_is_left_out_is_widths_or_the_word_wider(words: str, found: LeftOut | None) -> None:
    assert left_out(words.split()) == found


def test_what_was_planned_and_not_asked_for_is_missed_unless_its_test_failed(tmp_path: Path, golden: Golden) -> None:
    plan(tmp_path, a=1, b=1, c=1)
    said = {"a": "all", "b": "all", "c": "some"}
    failed = {**result("another", "regressed"), "nodeid": "c"}
    write(tmp_path, 1, result("a"), failed, exit_code=1, suite=suite(1, *said, said=said))
    troubles = night_results.gather([tmp_path], []).troubles
    golden([line for line in troubles if "not judged" in line])


def test_launches_alone_are_no_result_that_is_missed(tmp_path: Path) -> None:
    planned = [{"id": "a", "nodeid": "a", "width": 1, "judges": False}]
    write(tmp_path, 0, planned=planned, suite=suite(None, "a", said={"a": "some"}))
    (tmp_path / "gpus-0.json").rename(tmp_path / "plan.json")
    write(tmp_path, 1, suite=suite(1, "a", said={"a": "all"}), skipped=[{"id": "z", "reason": "r"}])
    assert not any("not judged" in line for line in night_results.gather([tmp_path], []).troubles)


def test_a_test_that_its_own_width_ran_was_left_by_others_for_good_reason(tmp_path: Path) -> None:
    left = {"id": "x", "nodeid": "a", "width": 2, "reason": "x: of 2", "elsewhere": "test"}
    write(tmp_path, 1, result("b"), suite=suite(1, "a", "b", said={"a": "stopped", "b": "all"}), skipped=[left])
    write(tmp_path, 2, result("c"), suite=suite(2, "a", "c", said={"a": "all", "c": "all"}))
    assert night_results.gather([tmp_path], []).troubles == ()


def test_a_plan_that_is_broken_or_asked_only_some_is_told(tmp_path: Path, golden: Golden) -> None:
    write(tmp_path, 1, result("a"), suite=suite(1, "a", said={"a": "all"}))
    (tmp_path / "plan.json").write_text("{")
    assert "plan.json: not JSON" in night_results.gather([tmp_path], []).troubles[0]
    write(tmp_path, 0, planned=[], suite=suite(None, "a", "b", said={"a": "all"}))
    (tmp_path / "gpus-0.json").rename(tmp_path / "plan.json")
    golden(night_results.gather([tmp_path], []).notes)


def test_a_pytest_that_died_after_its_results_is_red(tmp_path: Path, golden: Golden) -> None:
    write(tmp_path, 1, result("a"))
    (tmp_path / "gpus-1.exit").write_text("139\n\n")
    golden(night_results.gather([tmp_path], []).troubles)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4 deselected in 0.01s\n", "4 deselected"),
        ("\x1b[31m=== \x1b[33m3 passed, 1 warning\x1b[0m in 1.00s ===\x1b[0m\n", "3 passed, 1 warning"),
        ("!!!!! _pytest.outcomes.Exit: node n2 failed !!!!!\n== no tests ran in 0.10s ==\n", "node n2 failed"),
        ("== no tests ran in 0.10s ==\n", "no tests ran"),
    ],
)
def test_the_last_word_is_found_however_pytest_says_it(text: str, said: str) -> None:
    assert last_word(text) == said


def test_what_was_not_collected_is_noted_and_doubts_are_told_where_unused_baselines_are_red(
    tmp_path: Path, golden: Golden
) -> None:
    said = {"a": "all", "t.py::skipped": "some"}
    whole = suite(None, *said, said=said)
    whole["coverage"]["gaps"] = ["test_flash.py: collection skipped"]
    write(tmp_path, 0, planned=[{"id": "a", "nodeid": "a", "width": 1}], suite=whole)
    (tmp_path / "gpus-0.json").rename(tmp_path / "plan.json")
    write(tmp_path, 1, result("a"), suite=suite(1, *said, said=said))
    notes = "\n".join(night_results.gather([tmp_path], []).notes)
    golden(notes)


def test_what_was_recorded_says_so(tmp_path: Path) -> None:
    write(tmp_path, 1, {**result("a", "new"), "updated": "recorded a"})
    (row,) = [line for line in night_results.gather([tmp_path], []).page() if line.startswith("| a ")]
    assert row.rstrip(" |").endswith("recorded")


def test_an_option_that_pytest_does_not_know_is_its_last_word() -> None:
    usage = "ERROR: usage: python -m pytest [options]"
    text = f"{usage}\n__main__.py: error: unrecognized arguments: --perf-strct\n  rootdir: /x\n"
    assert last_word(text) == "unrecognized arguments: --perf-strct"


def test_a_test_that_pytest_skipped_is_told_with_its_reason(golden: Golden) -> None:
    coverage = {"nodes": ["t.py::a", "t.py::b"], "parts": [], "gaps": [], "said": {"t.py::a": "all", "t.py::b": "all"}}
    skip = {"nodeid": "t.py::a", "outcome": "skipped", "phase": "call", "reason": "Skipped: no time"}
    suite = {"rootdir": "", "baselines": "", "digests": [], "strict": False, "coverage": coverage}
    document = {"results": [], "suite": suite, "tests": [skip]}
    golden(night_tests.silent(night_tests.Tests.of([document_of(document)], [])))
