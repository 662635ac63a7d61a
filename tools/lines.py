"""Which test runs which lines: a plugin of pytest, for ``tools.mutants``.

Each test has a file in the folder that ``TEST_LINES`` names: its id, a row for each line of the package, and how it
ended. What it forks or starts writes into the same one, as the variable ``TEST_LINES_NOW`` is inherited: this module is
imported wherever an interpreter starts (``Copy.made``), so it imports little and never pytest.
PYTEST_DONT_REWRITE: pytest finds it imported.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from types import CodeType
from typing import Any

FOLDER, NOW, ONLY = "TEST_LINES", "TEST_LINES_NOW", "TEST_LINES_ONLY"

_CHECKOUT = os.path.dirname(os.path.dirname(__file__)) + os.sep  # noqa: PTH120
_PACKAGE = _CHECKOUT + "pytest_llmperf" + os.sep
# Tests replace some of these.
_OPEN, _WRITE, _CLOSE, _CLOCK = os.open, os.write, os.close, time.perf_counter
_TOOL = 4
"""No debugger, profiler or coverage tool has this number."""

_asleep: dict[int, CodeType] = {}
_test: dict[str, Any] = {"path": "", "began": 0.0, "ended": "passed"}


def _write(path: str, row: str) -> None:
    """At once: a process may end in any way."""
    file = _OPEN(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    _WRITE(file, f"{row}\n".encode())
    _CLOSE(file)


if sys.version_info >= (3, 12):

    def _ran(code: CodeType, line: int) -> object:
        path = os.environ.get(NOW) or _test["path"]
        if path:
            _write(path, f"{code.co_filename[len(_CHECKOUT) :]}:{line}")
        _asleep[id(code)] = code
        return sys.monitoring.DISABLE  # of this line: a loop costs nothing

    def _wake() -> None:
        """All lines count again. Only those of the package: to restart all events goes through each library."""
        for code in _asleep.values():
            sys.monitoring.set_local_events(_TOOL, code, 0)
            sys.monitoring.set_local_events(_TOOL, code, sys.monitoring.events.LINE)
        _asleep.clear()

    def _watched(code: CodeType) -> None:
        sys.monitoring.set_local_events(_TOOL, code, sys.monitoring.events.LINE)
        for each in code.co_consts:
            if isinstance(each, CodeType):
                _watched(each)

    def _begin() -> None:
        sys.monitoring.use_tool_id(_TOOL, __name__)
        sys.monitoring.register_callback(_TOOL, sys.monitoring.events.LINE, _ran)
        os.register_at_fork(after_in_child=_wake)
        # Python's own loader and the one of pytest, which rewrites asserts, both hand a module's code to `exec`.
        sys.addaudithook(_seen)

    def _seen(event: str, arguments: tuple[object, ...]) -> None:
        if event == "exec" and isinstance(arguments[0], CodeType) and arguments[0].co_filename.startswith(_PACKAGE):
            _watched(arguments[0])

    def pytest_runtest_logstart(nodeid: str) -> None:
        if FOLDER in os.environ:
            name = hashlib.sha256(nodeid.encode()).hexdigest()[:20]
            os.environ[NOW] = os.path.join(os.environ[FOLDER], name)  # noqa: PTH118
            _test.update(path=os.environ[NOW], began=_CLOCK(), ended="passed")
            _write(_test["path"], nodeid)
            _wake()

    if FOLDER in os.environ:
        _begin()


def pytest_runtest_logreport(report: Any) -> None:
    if report.outcome != "passed":
        _test["ended"] = report.outcome


def pytest_runtest_logfinish() -> None:
    if _test["path"]:
        _write(_test["path"], f"{_test['ended']} {_CLOCK() - _test['began']:.3f}")
        _test["path"] = ""
        os.environ.pop(NOW, None)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Only those that the file ``TEST_LINES_ONLY`` lists, in its order."""
    if ONLY in os.environ:
        with open(os.environ[ONLY], encoding="utf-8") as file:  # noqa: PTH123
            order = {name: place for place, name in enumerate(file.read().splitlines())}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
