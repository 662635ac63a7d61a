"""CaseName: what an id tells of its case, where the case's spec is not at hand: documents have ids alone. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Every id begins with its model and goes on with its precision (``settings/train_spec.py``).
_MODEL = re.compile(r"^(?P<model>.+?)-(?P<settings>(?:fp32|tf32|bf16|fp16)\b.*)$")
_WIDTH = re.compile(r"-gpus(\d+)$")


@dataclass(frozen=True)
class CaseName:
    """Its parts."""

    model: str
    settings: str
    """Without the number of GPUs."""
    gpus: int | None

    @classmethod
    def of(cls, name: str) -> CaseName:
        width = _WIDTH.search(name)
        rest = name[: width.start()] if width else name
        gpus = int(width.group(1)) if width and len(width.group(1)) < _MOST_DIGITS else None
        found = _MODEL.match(rest)
        return cls(found["model"] if found else "", found["settings"] if found else rest, gpus)

    @property
    def rung(self) -> str:
        """What tells it from the others of a ladder: its settings, and its GPUs where these are several."""
        return f"{self.settings} {self.gpus} GPUs" if (self.gpus or 0) > 1 else self.settings

    @property
    def training(self) -> str:
        """What cases that differ in their GPUs alone have in common."""
        return f"{self.model}-{self.settings}" if self.model else self.settings


_MOST_DIGITS = 7
