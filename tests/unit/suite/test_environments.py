"""tox.ini's environments: together they run every test."""

from __future__ import annotations

import ast
import re
from configparser import ConfigParser
from itertools import combinations
from pathlib import Path

import pytest

from tests.folders import NEED_TORCH, out_of_place
from tools import side_by_side

REPOSITORY = Path(__file__).parents[3]
TESTS = REPOSITORY / "tests"
FOLDERS = sorted({path.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/test_*.py")})
OF_TORCH = frozenset(
    "accelerate datasets liger_kernel pyarrow safetensors tokenizers torch torchao transformers triton".split()
)


def runs(environment: str) -> list[tuple[list[str], str]]:
    """Paths and markers of each pytest that it starts where ``make test`` has no ARGS; no paths: all."""
    ini = ConfigParser(interpolation=None)
    ini.read(REPOSITORY / "tox.ini", encoding="utf-8")
    found = re.findall(r"pytest [^\n]*-m \"(.*?)\" \{posargs:?(.*?)\}", ini[f"testenv:{environment}"]["commands"])
    assert found
    return [(words.split(), markers) for markers, words in found]


def selects(environment: str, folder: str, markers: tuple[str, ...]) -> bool:
    """Whether one of its runs has a test of this folder with these markers."""
    known = {name: name in markers for name in ("gpu", "processes", "simulated", "slow", "slurm", "torchrun", "wide")}
    return any(
        (paths in ([], ["tests"]) or f"tests/{folder}" in paths) and eval(expression, {}, known)
        for paths, expression in runs(environment)
    )


# A test of a GPU is for a machine with one.
MARKERS = [names for number in range(4) for names in combinations(("slow", "slurm", "torchrun"), number)]
PLACES = [(folder, markers) for folder in FOLDERS for markers in MARKERS if not out_of_place(folder, markers)]


@pytest.mark.parametrize(("folder", "markers"), PLACES, ids=str)
def test_every_test_runs_in_one_of_them(folder: str, markers: tuple[str, ...]) -> None:
    assert selects("full" if folder in NEED_TORCH else "lean", folder, markers)


def test_what_is_wide_runs_in_its_own_and_in_no_other() -> None:
    wide = ("slow", "torchrun", "wide")
    assert [name for name in ("full", "lean", "wide") if selects(name, "worker", wide)] == ["wide"]
    assert not selects("wide", "worker", ("slow", "torchrun"))
    assert "make test-wide" in (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")


def test_what_is_simulated_runs_on_the_oldest_python_and_all_examples_there() -> None:
    marked = {path for path in TESTS.rglob("test_*.py") if "mark.simulated" in path.read_text(encoding="utf-8")}
    for folder in {path.relative_to(TESTS).parts[0] for path in marked - {Path(__file__)}}:
        assert selects("oldest", folder, ("simulated",))
        assert not selects("lean", folder, ("simulated",))
    properties = {
        path for path in TESTS.rglob("test_*.py") if "from hypothesis import" in path.read_text(encoding="utf-8")
    }
    ini = ConfigParser(interpolation=None)
    ini.read(REPOSITORY / "tox.ini", encoding="utf-8")
    assert "--hypothesis-profile few" in ini["testenv:lean"]["commands"]
    assert "--hypothesis-profile" not in ini["testenv:oldest"]["commands"]
    assert {path.relative_to(TESTS).parts[0] for path in properties} <= {"unit", "engine", "worker"}


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: path.name)
def test_what_imports_torch_stands_where_it_is_installed(path: Path) -> None:
    # Elsewhere `importorskip` would skip it in the one environment that runs it.
    if path.relative_to(TESTS).parts[0] not in NEED_TORCH:
        assert not OF_TORCH & imported(ast.parse(path.read_text(encoding="utf-8")))


def imported(tree: ast.Module) -> set[str]:
    """The packages that it imports anywhere, or skips without."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module)):
                names.add(module)
            case ast.Call(func=ast.Attribute(attr="importorskip"), args=[ast.Constant(value=str(name)), *_]):
                names.add(name)
    return {name.partition(".")[0] for name in names}


def test_the_environments_of_make_test_are_these() -> None:
    (words,) = re.findall(r"TOX_TWO\) -e (\S+) ", (REPOSITORY / "Makefile").read_text(encoding="utf-8"))
    assert {"full", "lean"} <= set(words.split(","))


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((0, 0, 0), 0), ((0, 1, 0), 1), ((0, 0, 2), 2), ((0, 5, 5), 0), ((5, 1, 0), 1), ((5, 5, 5), 5)],
)
def test_what_finds_none_of_the_tests_asked_for_is_red_only_if_all_find_none(
    codes: tuple[int, int, int], expected: int
) -> None:
    first, second, other = (["sh", "-c", f"exit {code}"] for code in codes)
    assert side_by_side.main([*first, "--then", *second, "--beside", *other]) == expected


@pytest.mark.parametrize(
    ("folder", "marker", "said"),
    [
        ("unit", "torchrun", "marked torchrun; it belongs in tests/worker"),
        ("worker", "slurm", "in tests/slurm every test is marked slurm"),
        ("slurm", "slow", "in tests/slurm every test is marked slurm"),
    ],
)
def test_a_marker_that_its_folder_does_not_go_with_is_refused(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, folder: str, marker: str, said: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    pytester.makeini("[pytest]\nmarkers =\n    torchrun\n    slow\n    slurm\n")
    pytester.makeconftest((TESTS / "conftest.py").read_text(encoding="utf-8"))
    (pytester.path / folder).mkdir()
    (pytester.path / folder / "test_it.py").write_text(f"import pytest\n\n@pytest.mark.{marker}\ndef test_it(): pass\n")
    result = pytester.runpytest_subprocess("-p", "no:randomly")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{folder}/test_it.py::test_it: {said}*"])
