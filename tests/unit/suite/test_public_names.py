"""What users import: the names that are documented are there, and the project's own suite needs no other."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pytest_llmperf
from tests.golden import Golden
from tools.documentation import reference

REPOSITORY = Path(__file__).parents[3]
PACKAGE = Path(pytest_llmperf.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    for path in PACKAGE.rglob("*.py")
    if not {"observe", "worker"} & {*path.relative_to(PACKAGE).parts} and path.stem not in ("__init__", "__main__")
)
SUITE = sorted((REPOSITORY / "perf_tests").glob("*.py"))


def test_the_reference_lists_every_name() -> None:
    assert sorted(re.findall(r"^## `(\w+)`$", reference.page("names"), re.MULTILINE)) == sorted(pytest_llmperf.__all__)


@pytest.mark.parametrize("name", pytest_llmperf.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(pytest_llmperf, name) is not None


@pytest.mark.parametrize("name", MODULES)
def test_every_module_but_the_workers_is_imported(name: str) -> None:
    importlib.import_module(name)


def test_another_name_is_an_attribute_error(golden: Golden) -> None:
    with pytest.raises(AttributeError) as raised:
        _ = pytest_llmperf.Pref
    golden(raised)


@pytest.mark.parametrize("path", SUITE, ids=lambda path: path.stem)
def test_the_suite_imports_nothing_else(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    modules = {match[1] for match in re.finditer(r"^\s*(?:from|import) (pytest_llmperf\S*)", text, re.MULTILINE)}
    assert {each for each in modules if not each.startswith("pytest_llmperf.analysis")} <= {"pytest_llmperf"}


def test_the_worker_gets_no_pytest_with_them() -> None:
    code = "import sys, pytest_llmperf; print([name for name in ('pytest', '_pytest', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_old_name_of_analysis_still_imports_and_says_so(golden: Golden) -> None:
    code = (
        "import warnings; warnings.simplefilter('error', DeprecationWarning)\n"
        "try: import pytest_llmperf.insight\n"
        "except DeprecationWarning as told: print(told)\n"
        "warnings.simplefilter('ignore')\n"
        "from pytest_llmperf.insight.chapter15 import LADDERS\n"
        "from pytest_llmperf.insight.ladder import Rung\n"
        "from pytest_llmperf.insight.cost import Price\n"
        "from pytest_llmperf.analysis.cost import joules_per_token\n"
        "from pytest_llmperf.insight import memory_formulas\n"
        "print(len(LADDERS))\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    deprecated, ladders = told
    golden(deprecated)
    assert ladders == "2"
