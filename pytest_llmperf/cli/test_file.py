"""TestFile: the test that holds a winner from tomorrow on, and those that were found before it."""

from __future__ import annotations

import ast
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_llmperf.cli.answer import CaseError
from pytest_llmperf.cli.asked_run import unusual_settings
from pytest_llmperf.cli.baseline_folder import spec_defaults
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support.files import refused_at, write_text

_TEXT = '''"""Configurations that `llmperf tune` has found to be the fastest, held by their baselines.

It adds to CASES and leaves the rest of this file alone as long as nothing else is in it.
"""

import pytest

from pytest_llmperf import TrainSpec

CASES = [
{cases}
]


@pytest.mark.parametrize("spec", [TrainSpec(**case) for case in CASES], ids=lambda spec: spec.id)
def test_tuned(perf, spec):
    perf.check(spec)
'''


@dataclass(frozen=True)
class TestFile:
    """One such file, with what it holds so far."""

    __test__ = False

    path: Path
    cases: tuple[Mapping[str, Any], ...]

    @classmethod
    def at(cls, path: Path) -> TestFile:
        """What ``path`` holds, if it is there; CaseError: it cannot be written, or is somebody's own."""
        if path.suffix != ".py" or not path.name.startswith("test_"):
            raise CaseError(f"--write {path}: pytest collects files named test_*.py, e.g. perf_tests/test_tuned.py")
        if not path.exists():
            if not path.parent.is_dir():
                raise CaseError(f"--write {path}: there is no folder {path.parent}")
            _refuse_unwritable(path)
            return cls(path, ())
        try:
            text = path.read_text(encoding="utf-8")
            cases = _cases(text)
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
            raise CaseError(f"--write {path}: it is there, and was not written by this command ({error})") from error
        if text != _text(cases):
            raise CaseError(f"--write {path}: it was edited; name another file, or move what is yours out of it")
        _refuse_unwritable(path)
        return cls(path, cases)

    @property
    def nodeid(self) -> str:
        """The test that holds the cases."""
        return f"{self.path.as_posix()}::test_tuned"

    def write(self, winner: TrainSpec) -> list[TrainSpec]:
        """With ``winner`` in the place of what it beats, which it returns. CaseError: somebody edited it; OSError."""
        case, usual = unusual_settings(winner), spec_defaults()

        def same(other: Mapping[str, Any]) -> bool:
            names = ("model", "sequence_length", "gpus")
            return all(other.get(name, usual.get(name)) == case.get(name, usual.get(name)) for name in names)

        cases = TestFile.at(self.path).cases
        try:
            beaten = [TrainSpec(**other) for other in cases if same(other) and other != case]
        except (TypeError, ValueError) as error:
            raise CaseError(f"--write {self.path}: a case in it is none of this version's ({error})") from error
        write_text(self.path, _text([*(other for other in cases if not same(other)), case]))
        return beaten


def _refuse_unwritable(path: Path) -> None:
    """Before minutes are spent on what it would hold; a file that is read-only is somebody's wish."""
    why = "it is read-only" if path.exists() and not path.stat().st_mode & stat.S_IWUSR else refused_at(path)
    if why:
        raise CaseError(f"--write {path}: it cannot be written ({why}); name another file")


def _cases(text: str) -> tuple[Mapping[str, Any], ...]:
    """As ``_text`` wrote them; SyntaxError, ValueError: it did not."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and [getattr(one, "id", "") for one in node.targets] == ["CASES"]:
            found = ast.literal_eval(node.value)
            if isinstance(found, list) and all(isinstance(one, dict) for one in found):
                return tuple(found)
    raise ValueError("it has no list CASES")


def _text(cases: Sequence[Mapping[str, Any]]) -> str:
    """As a formatter would have it: an entry a line."""
    blocks = []
    for case in cases:
        lines = "".join(f"        {_quoted(name)}: {_quoted(value)},\n" for name, value in case.items())
        blocks.append(f"    {{\n{lines}    }},")
    return _TEXT.format(cases="\n".join(blocks))


def _quoted(value: object) -> str:
    if not isinstance(value, str):
        return repr(value)
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
