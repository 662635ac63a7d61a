"""The tool that asks whether the tests see small faults."""

from __future__ import annotations

from pathlib import Path

from tools.mutants import EQUIVALENT, LATER, PACKAGE, REPOSITORY, ROOMS, drawn, mutants

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
    paths = [path for group in (*ROOMS.values(), *LATER) for path in group]
    assert [path for path in paths if not Path(REPOSITORY, path).is_dir()] == []


def test_what_no_test_can_see_is_still_a_mutant() -> None:
    files = {PACKAGE / change.partition(":")[0] for change in EQUIVALENT}
    found = [each.change for path in files for each in mutants(path, (REPOSITORY / path).read_text(encoding="utf-8"))]
    assert set(EQUIVALENT) <= set(found)
