"""The tool that asks whether the tests see small faults."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import lines
from tools.mutants import EQUIVALENT, PACKAGE, REPOSITORY, ROOMS, TESTS, Copy, Lines, Mutant, apart, drawn, mutants

SOURCE = '''
from __future__ import annotations


def share(part: int | None, whole: int) -> float:
    """A share."""
    if not whole or part is None:
        warn(f"no {whole + 1}")
    return part / whole
'''


def test_each_kind_of_place_is_changed_and_words_and_types_are_not() -> None:
    found = [mutant.change.partition(": ")[2] for mutant in mutants(PACKAGE / "judge" / "share.py", SOURCE)]
    assert sorted(found) == [
        "not whole -> whole",
        "not whole or part is None -> (not whole and part is None)",
        "part / whole -> (part * whole)",
        "part is None -> (part is not None)",
        "return part / whole -> return None",
        'warn(f"no {whole + 1}") -> pass',
    ]


def test_only_the_place_is_another() -> None:
    (one,) = [each for each in mutants(PACKAGE / "share.py", SOURCE) if each.before == "part / whole"]
    assert one.applied(SOURCE.encode()).decode() == SOURCE.replace("part / whole", "(part * whole)")


def test_a_seed_draws_the_same_ones_again_from_rooms_and_tests_that_exist() -> None:
    assert drawn(["records"], 20, 3) == drawn(["records"], 20, 3) != drawn(["records"], 20, 4)
    assert all((REPOSITORY / PACKAGE / room).is_dir() for room in ROOMS)
    assert [path for path in TESTS if not Path(REPOSITORY, path).is_dir()] == []
    rooms = {path.name for path in Path(REPOSITORY, "tests", "unit").iterdir() if any(path.glob("test_*.py"))}
    assert rooms == {Path(path).name for path in TESTS if "unit" in path} | {"suite"}


def _mutant(before: str, *, source: str = SOURCE) -> Mutant:
    (one,) = [each for each in mutants(PACKAGE / "share.py", source) if each.before == before]
    return one


def test_those_that_run_the_line_are_chosen_one_of_each_function_first(tmp_path: Path) -> None:
    place = f"{PACKAGE}/share.py"
    for name, rows in {
        "t.py::test_share[a]": (f"{place}:9", "passed 0.2"),
        "t.py::test_share[b]": (f"{place}:9", "passed 0.1"),
        "t.py::test_half": (f"{place}:6", f"{place}:9", "passed 3"),
        "t.py::test_of_another_line": (f"{place}:6", "passed 0.1"),
        "t.py::test_that_fails": (f"{place}:9", "failed 0.1"),
        "t.py::test_that_never_ended": (f"{place}:9",),
        "t.py::test_that_is_slow": (f"{place}:9", "passed 100"),
    }.items():
        (tmp_path / "room").mkdir(exist_ok=True)
        (tmp_path / "room" / str(hash(name))).write_text("\n".join([name, *rows]), encoding="utf-8")
    known = Lines.read(tmp_path)
    assert known.of(_mutant("part / whole")) == ["t.py::test_share[b]", "t.py::test_half", "t.py::test_share[a]"]
    assert known.failed == {"t.py::test_that_fails", "t.py::test_that_never_ended"}
    of_all = known.of(_mutant("2", source="MOST = 2\n"))
    assert "t.py::test_of_another_line" in of_all, "what runs at import is seen by any test of the file"


def test_what_is_part_of_another_waits_for_the_next_turn() -> None:
    outer, inner, other = _mutant("not whole or part is None"), _mutant("not whole"), _mutant("part / whole")
    assert [*apart([outer, inner, other])] == [[outer, other], [inner]]


TESTED = """
import os

from pytest_llmperf.share import share


def test_half():
    assert share(1, 2) == 0.5


def test_a_third():
    assert share(1, 3) == 0.5


def test_a_quarter_elsewhere():
    if not (pid := os.fork()):
        share(1, 4)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_nothing():
    pass
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.version_info < (3, 12), reason="lines are watched by sys.monitoring")
def test_each_test_tells_its_lines_and_what_it_forks_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, written = Copy(tmp_path, Path(sys.executable)), tmp_path / "lines" / "room"
    for name, text in {
        PACKAGE / "__init__.py": "",
        PACKAGE / "share.py": SOURCE,
        Path("tools/lines.py"): Path(lines.__file__).read_text(encoding="utf-8"),
        Path("test_share.py"): TESTED,
        Path("pytest.ini"): "[pytest]\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    written.mkdir(parents=True)
    monkeypatch.setattr("tools.mutants._USUAL", ("-p", "tools.lines", "-p", "no:llmperf", "-p", "no:cacheprovider"))
    copy.run("test_share.py", **{lines.FOLDER: str(written)})
    known, mutant = Lines.read(tmp_path / "lines"), _mutant("part / whole")
    assert known.failed == {"test_share.py::test_a_third"}
    chosen = known.of(mutant)
    assert {*chosen} == {"test_share.py::test_half", "test_share.py::test_a_quarter_elsewhere"}
    assert copy.failed(chosen) == ""
    with copy.changed([mutant]):
        assert copy.failed(chosen) == "test_share.py::test_half"
    assert copy.failed(["test_share.py::test_gone"]) == "", "a test that is there no more sees nothing"


def test_what_no_test_can_see_is_still_a_mutant() -> None:
    files = {PACKAGE / change.partition(":")[0] for change in EQUIVALENT}
    found = [each.change for path in files for each in mutants(path, (REPOSITORY / path).read_text(encoding="utf-8"))]
    assert set(EQUIVALENT) <= set(found)
