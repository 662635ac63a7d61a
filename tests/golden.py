"""Goldens: what people and programs see of the plugin, as files that a change of its inside leaves as they are."""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "tests" / "frozen" / "golden"

# Sums may differ in their last digits from one processor to another; what has no point is a count, and exact.
_FLOAT = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?|-?\d+e[-+]\d+")
_CLOSE = 1e-7
_MARK = "§ "
# Of pytest's own summary: cut where the terminal ends, or with the line of a source.
_SUMMARY = re.compile(r"(FAILED|ERROR) .*\.\.\.|SKIPPED \[\d+\] (\.\.)?/.*")


class Golden:
    """Compares a text with the golden of its name, or writes that anew.

    ``golden(found)`` compares with this test's section of ``golden/MODULE.txt`` beside it; folders, the checkout and
    the Python have one name there. ``golden.lines(found, "two words")`` takes only the lines with such words: from
    output that is long, or that varies. ``golden.check`` has a file of its own in ``tests/frozen/golden``.
    """

    def __init__(self, test: Path, name: str, scratch: Path, *, renews: bool) -> None:
        self._path = test.parent / "golden" / f"{test.stem}.txt"
        self._name = name
        self._scratch = scratch
        self._renews = renews
        self._found: dict[str, str] = {}

    def __call__(self, found: object) -> None:
        number = f" ({len(self._found) + 1})" if self._found else ""
        text = self._found[self._name + number] = self._steady(text_of(found)).rstrip("\n")
        assert not re.search(f"^{_MARK}", text, re.MULTILINE), f"a line begins as a section does: {text}"
        if not self._renews:
            where, stored = f"{self._path}: {self._name}{number}", sections(self._path)
            assert self._name + number in stored, f"{where}: no such section; --renew-golden writes it:\n{text}"
            compare(text, stored[self._name + number], where)

    def lines(self, found: object, *words: str) -> None:
        whole = [line for line in text_of(found).split("\n") if not _SUMMARY.fullmatch(line)]
        these = [line for line in whole if any(each in line for each in words)]
        lacking = [each for each in words if not any(each in line for line in these)]
        assert not lacking, f"no line with {lacking} in:\n{text_of(found)}"
        self(these)

    def check(self, name: str, found: str) -> None:
        path = FOLDER / name
        found = found.rstrip("\n") + "\n"
        if self._renews:
            path.write_text(found, encoding="utf-8")
        compare(found, path.read_text(encoding="utf-8") if path.exists() else "", str(path))

    def check_json(self, name: str, found: Any) -> None:
        self.check(name, json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False))

    def close(self) -> None:
        """Write the sections of this test in place of its former ones."""
        if not self._renews or not self._found:
            return
        self._path.parent.mkdir(exist_ok=True)
        # Tests of one module may run in several processes.
        with FileLock(self._scratch / f"{self._path.stem}.lock"):
            former = re.compile(re.escape(self._name) + r"( \(\d+\))?")
            kept = {name: text for name, text in sections(self._path).items() if not former.fullmatch(name)}
            parts = (f"{_MARK}{name}\n{text}\n" for name, text in sorted((kept | self._found).items()))
            self._path.write_bytes("".join(parts).encode())

    def _steady(self, text: str) -> str:
        """The text without what differs from one run, checkout or machine to another."""
        temporary = re.escape(tempfile.gettempdir())
        programs = {Path(sys.argv[0]).name, "__main__.py", "pytest", "-c"}
        for pattern, name in (
            (re.escape(str(self._scratch)) + r"(/popen-gw\d+)?/(?!popen-gw)[\w.-]+", "<tmp>"),
            (re.escape(str(self._scratch)) + r"(/popen-gw\d+)?\b", "<scratch>"),
            (re.escape(sys.executable), "<python>"),
            (re.escape(str(REPOSITORY)), "<repository>"),
            (r"\btransformers \d+\.\d+\.\d+", "transformers <version>"),
            (r" ?([=_!])\1{2,} ?", ""),  # as wide as the terminal
            # Two runs of one second and process cannot have one folder: where the other has its own is chance.
            (rf"(<tmp>/\.llmperf|{temporary}/pytest-llmperf-runs-\d+)/\d{{8}}-\d{{6}}-[\d-]+", "<run>"),
            (rf"{temporary}/llmperf-\w+", "<run>"),
            (r"\b\d{8}-\d{6}-\d+\b", "<run>"),
            (datetime.now(timezone.utc).date().isoformat(), "<today>"),
            (rf"(?m)(^|usage: )({'|'.join(map(re.escape, programs))})(?=: error: | \[)", r"\1<program>"),
        ):
            text = re.sub(pattern, name, text)
        return text


def sections(path: Path) -> dict[str, str]:
    """The texts of a module's tests, by the test's name."""
    if not path.exists():
        return {}
    parts = re.split(f"^{_MARK}", path.read_bytes().decode(), flags=re.MULTILINE)[1:]
    return {name: text.removesuffix("\n") for name, _, text in (part.partition("\n") for part in parts)}


def text_of(found: object) -> str:
    """As a person reads it: a line for each item, an error by its message."""
    match found:
        case str():
            return found
        case pytest.ExceptionInfo():
            return str(found.value)
        case Mapping():
            return "\n".join(f"{key}: {value}" for key, value in found.items())
        case Iterable() if not isinstance(found, bytes):
            return "\n".join(map(str, found))
        case _:
            return str(found)


def compare(found: str, wanted: str, where: str) -> None:
    if not alike(found, wanted):
        lines = unified_diff(wanted.split("\n"), found.split("\n"), "golden", "now", n=1, lineterm="")
        raise AssertionError("\n".join([f"{where}: CONTRIBUTING.md says how it is renewed", *lines]))


def alike(found: str, wanted: str) -> bool:
    """Whether they are the same but for the last digits of numbers with a point."""
    numbers = zip(map(float, _FLOAT.findall(found)), map(float, _FLOAT.findall(wanted)), strict=False)
    return _FLOAT.sub("#", found) == _FLOAT.sub("#", wanted) and all(
        math.isclose(*two, rel_tol=_CLOSE, abs_tol=_CLOSE / 100) for two in numbers
    )
