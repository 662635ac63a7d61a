"""The package's own measures: what grows beyond them is to be shortened first, or shared."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]

PACKAGE = REPOSITORY / "pytest_llmperf"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = "|".join(folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists())
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

# Ceilings: lower them with what is taken out.
MOST_LINES, MOST_FILES, MOST_FUNCTION_LINES, MOST_IMPORTS = 44_999, 209, 50, 12

# A command has the name of what it is about, a setting its twin in the worker, and a seam its other side.
TWINS = {"device", "evidence", "history", "parity", "plan", "script"} | {
    path.stem for path in PACKAGE.glob("settings/*.py")
}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def imported(tree: ast.Module) -> set[str]:
    """The modules and packages of ours that a module imports, wherever it does: in a function and for types too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import would be counted as none"
            names = {f"{node.module}.{each.name}" for each in node.names}
            found |= {name if is_module(name) else name.rpartition(".")[0] for name in names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return {name for name in found if name.partition(".")[0] == PACKAGE.name}


def is_module(name: str) -> bool:
    path = REPOSITORY / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def test_the_package_stays_as_small_as_it_has_become() -> None:
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in FILES)
    assert lines <= MOST_LINES
    assert len(FILES) <= MOST_FILES


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_function_fits_a_page(path: Path) -> None:
    functions = [node for node in ast.walk(TREES[path]) if isinstance(node, ast.FunctionDef)]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_FUNCTION_LINES}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_module_joins_few_others(path: Path) -> None:
    found = imported(TREES[path])
    assert len(found) <= MOST_IMPORTS, sorted(found)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_docstring_names_modules_that_exist(path: Path) -> None:
    named = re.findall(rf"``((?:{ROOMS})[./]\w+)", path.read_text(encoding="utf-8"))
    homes = [PACKAGE / name.replace(".", "/") for name in named if not name.endswith(".json")]
    assert not [home for home in homes if not home.is_dir() and not home.with_suffix(".py").exists()]


def test_no_two_files_have_one_name() -> None:
    names = Counter(path.stem for path in FILES if not path.stem.startswith("__"))
    assert {name for name, count in names.items() if count > 1} <= TWINS
