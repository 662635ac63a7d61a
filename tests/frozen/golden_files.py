"""Goldens: what people and programs see of the plugin, as files that a change of its inside leaves as they are."""

from __future__ import annotations

import json
import math
import re
from difflib import unified_diff
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden"

# Sums may differ in their last digits from one processor to another; what has no point is a count, and exact.
_FLOAT = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?|-?\d+e[-+]\d+")
_CLOSE = 1e-7


class Golden:
    """Compares a text with the file of its name, or writes the file anew."""

    def __init__(self, *, renews: bool) -> None:
        self._renews = renews

    def check(self, name: str, found: str) -> None:
        path = FOLDER / name
        found = found.rstrip("\n") + "\n"
        if self._renews:
            path.write_text(found, encoding="utf-8")
        wanted = path.read_text(encoding="utf-8") if path.exists() else ""
        if not alike(found, wanted):
            lines = unified_diff(wanted.splitlines(), found.splitlines(), "golden", "now", n=1, lineterm="")
            raise AssertionError("\n".join([f"{path}: CONTRIBUTING.md says how it is renewed", *lines]))

    def check_json(self, name: str, found: Any) -> None:
        self.check(name, json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False))


def alike(found: str, wanted: str) -> bool:
    """Whether they are the same but for the last digits of numbers with a point."""
    numbers = zip(map(float, _FLOAT.findall(found)), map(float, _FLOAT.findall(wanted)), strict=False)
    return _FLOAT.sub("#", found) == _FLOAT.sub("#", wanted) and all(
        math.isclose(*two, rel_tol=_CLOSE, abs_tol=_CLOSE / 100) for two in numbers
    )
