"""Shared settings of the tests."""

from __future__ import annotations

import fcntl
import gc
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.examples import USUAL
from tests.folders import out_of_place
from tests.golden import Golden
from tests.template import Template

# Few users set it, and with it a line that nobody flushes is seen in time.
os.environ.pop("PYTHONUNBUFFERED", None)
# Tables and lines are as wide as this; a test that asks for another width sets it.
os.environ["COLUMNS"] = "80"

# A shared machine may pause any test for longer than hypothesis allows. The examples are the same everywhere and each
# time, and none is remembered: chance does not decide whether a change lands.
settings.register_profile(
    "llmperf", deadline=None, max_examples=USUAL, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("llmperf")
# `--hypothesis-profile few`, beside a run of all of them (`make test-wide`, on the oldest Python).
settings.register_profile("few", settings.get_profile("llmperf"), max_examples=10)
# `--hypothesis-profile many`, to look for what those examples miss: others each time, or by --hypothesis-seed.
settings.register_profile("many", settings.get_profile("llmperf"), max_examples=10 * USUAL, derandomize=False)

# The order of the tests too, where pytest-randomly is asked for none: any number.
_ORDER = 32


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew-golden", action="store_true", help="write the goldens of the tests that run anew")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """One order of the tests, unless ``--randomly-seed`` asks for another."""
    if getattr(config.option, "randomly_seed", None) == "default":
        config.option.randomly_seed = _ORDER


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected is no garbage: to look for some, then and in each test again, takes an eighth."""
    gc.disable()
    try:
        with _first_worker_first():
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _first_worker_first() -> Iterator[None]:
    """In a fresh clone xdist's first worker compiles the tests' asserts, and the others find that done.

    Where torch is there, its import takes longer than that.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    with Path(__file__).open(encoding="utf-8") as file:
        if worker is not None and find_spec("torch") is None:
            fcntl.flock(file, fcntl.LOCK_EX if worker == "gw0" else fcntl.LOCK_SH)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked for one environment and stands in a folder of another would run nowhere."""
    here = Path(__file__).parent
    for item in items:
        trouble = out_of_place(item.path.relative_to(here).parts[0], {marker.name for marker in item.iter_markers()})
        if trouble:
            raise pytest.UsageError(f"{item.nodeid}: {trouble}")


@pytest.fixture
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Golden]:
    """Compares with ``golden/MODULE.txt`` beside the test, and with the files of ``tests/frozen/golden``."""
    scratch, name = tmp_path_factory.getbasetemp(), request.node.nodeid.partition("::")[2]
    scratch = scratch.parent if scratch.name.startswith("popen-gw") else scratch
    it = Golden(request.path, name, scratch, renews=request.config.getoption("--renew-golden"))
    yield it
    it.close()


@pytest.fixture(scope="session", autouse=True)
def _pytest_is_forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What ``pytester`` runs in a process of its own is forked from one that has imported pytest."""
    popen = pytest.Pytester.popen
    templates: list[Template] = []  # started with the first test that runs one

    def forked(pytester: pytest.Pytester, command: Any, stdout: Any, stderr: Any, **others: Any) -> Any:
        words = list(map(str, command))
        if words[:2] != [sys.executable, "-mpytest"] or not hasattr(stdout, "fileno"):
            return popen(pytester, command, stdout, stderr, **others)
        templates[:] = templates or [Template(tmp_path_factory.mktemp("template"))]
        if not templates[0].fits(os.environ):
            return popen(pytester, command, stdout, stderr, **others)
        return templates[0].popen(words[2:], stdout, stderr)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytest.Pytester, "popen", forked)
        # The history of who runs the tests is none of these runs' own.
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
    for template in templates:
        template.close()
