"""Count the changes of module on a case's way: from ``perf.check`` to its rank, and from its record to the table.

``python -m tools.hops`` trains one tiny case on the CPU and prints both ways. A hop is a change of module of ours on
the call stack: where a launch is asked for, where its record is read, and where the table is printed.
"""

from __future__ import annotations

import socket
import subprocess
import tempfile
import traceback
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.report import summary_table

REPOSITORY = Path(__file__).parent.parent
_OURS = f"{REPOSITORY / 'pytest_llmperf'}/"
_TEST = """
from pytest_llmperf import TrainSpec

def test_case(perf):
    perf.check(TrainSpec(model="llama-tiny", micro_batch_size=1, sequence_length=32, steps=12))
"""


def path_of_stack() -> list[str]:
    """Modules of ours on the stack, outermost first, each change once."""
    names = [frame.filename for frame in traceback.extract_stack()]
    ours = (name.removeprefix(_OURS) for name in names if name.startswith(_OURS))
    return [name for name, _ in groupby(ours)]


class Ways:
    """A plugin of pytest that notes the longest way to each of three places."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.read: list[str] = []
        self.told: list[str] = []

    def note(self, kind: str) -> None:
        """Keep the way on the stack, where it is a case's and the longest yet."""
        path = path_of_stack()
        if "plugin/perf.py" in path:
            path = path[path.index("plugin/perf.py") :]
        elif kind != "told":
            return
        if len(path) > len(getattr(self, kind)):
            setattr(self, kind, path)

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Look where processes start, servers are asked, records are read, and tables are made."""
        for owner, name, kind in (
            (subprocess.Popen, "__init__", "asked"),
            (socket.socket, "sendmsg", "asked"),
            (socket.socket, "sendall", "asked"),
            (Path, "read_text", "read"),
            (summary_table, "render", "told"),
        ):
            self._wrap(patch, owner, name, kind)

    def _wrap(self, patch: pytest.MonkeyPatch, owner: Any, name: str, kind: str) -> None:
        own = getattr(owner, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            if kind != "read" or arguments[0].name == "launch.json":
                self.note(kind)
            return own(*arguments, **named)

        patch.setattr(owner, name, noted)


def ways() -> Ways:
    """Of one case that is really trained."""
    found = Ways()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        test = Path(folder) / "test_hops.py"
        test.write_text(_TEST, encoding="utf-8")
        patch.chdir(folder)
        found.watch(patch)
        words = ["-q", "-p", "no:cacheprovider", "--gpus", "0", "--perf-history=off", "--update-baselines=new"]
        if pytest.main([*words, str(test)]) != 0:
            raise SystemExit("the case did not pass")
    return found


if __name__ == "__main__":
    for title, path in vars(ways()).items():
        print(f"{title}: {len(path) - 1} hops: {' > '.join(path)}")
