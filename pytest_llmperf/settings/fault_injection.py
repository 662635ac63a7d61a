"""Injection: faults put into a training on purpose and by a known amount, as the environment asks for them.

``LLMPERF_INJECT="slow=0.03 rank=1 hold=268435456"`` makes every step of rank 1 (without ``rank``: of all) 3 % longer
and keeps 256 MiB. ``LLMPERF_INJECT="attention=eager"`` trains with another value of a setting than was asked for; that
is up to ``rank`` too. ``LLMPERF_INJECT="hang=5 rank=1"`` never comes back from step 5. The launch's evidence tells of
it, and such a launch is never stored.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pytest_llmperf.settings.train_spec import SpecError, TrainSpec
from pytest_llmperf.support.user_input import hint

VARIABLE = "LLMPERF_INJECT"


@dataclass(frozen=True)
class Injection:
    """What to burn and to hold."""

    slow: float = 0.0
    """Share of the step time, added to each step."""
    hold: int = 0
    """Bytes."""
    hang: int = 0
    """The step at whose end the rank stays for good; 0: none."""
    rank: int | None = None
    """The one rank that does all this; ``None`` is every rank."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the spec to train with instead of what was asked for."""

    @classmethod
    def from_environment(cls, num_ranks: int = 0) -> Injection:
        """As the variable says, for ``num_ranks`` ranks (0: nobody knows yet how many); a ``ValueError`` where it says
        what cannot be."""
        text = os.environ.get(VARIABLE, "")
        try:
            values = dict(word.split("=", 1) for word in text.split())
            rank = values.pop("rank", None)
            found = cls(
                slow=float(values.pop("slow", 0)),
                hold=int(values.pop("hold", 0)),
                hang=int(values.pop("hang", 0)),
                rank=None if rank is None else int(rank),
                settings={name: _value(text) for name, text in values.items()},
            )
        except ValueError as error:
            raise ValueError(
                f"{VARIABLE}={text!r}: expected slow=SHARE hold=BYTES hang=STEP rank=RANK SETTING=VALUE ({error})"
            ) from error
        problem = found.problem(num_ranks)
        if problem:
            raise ValueError(f"{VARIABLE}={text!r}: {problem}")
        return found

    def problem(self, num_ranks: int) -> str | None:
        """Why this cannot be done by ``num_ranks`` ranks (0: as many as need be), or ``None``."""
        if not 0 <= self.slow < math.inf:  # also true of NaN
            return f"slow={self.slow:g} must be a share of the step time, e.g. slow=0.03 for 3 %"
        if self.hold < 0:
            return f"hold={self.hold} must be a number of bytes"
        if self.hang < 0:
            return f"hang={self.hang} must be a step, e.g. hang=5"
        words, settings = ("slow", "hold", "hang", "rank"), [setting.name for setting in fields(TrainSpec)]
        for name in self.settings:
            if name not in settings:
                return f"{name}= is neither one of {', '.join(words)} nor a setting{hint(name, [*words, *settings])}"
        if self.rank is not None and not 0 <= self.rank < (num_ranks or math.inf):
            ranks = f", 0 to {num_ranks - 1}" if num_ranks else ""
            return f"rank={self.rank} must be one of this launch's ranks{ranks}"
        return None

    def mutated(self, spec: TrainSpec, rank: int) -> TrainSpec:
        """``spec`` as ``rank`` is to train it; a ``ValueError`` where that cannot be."""
        if not self.settings or self.rank not in (None, rank):
            return spec
        try:
            return TrainSpec.from_dict({**spec.to_dict(), **self.settings})
        except SpecError as error:
            raise ValueError(f"{VARIABLE}={os.environ.get(VARIABLE, '')!r}: {error}") from error

    def concerns(self, rank: int) -> bool:
        return bool(self.slow or self.hold or self.hang) and self.rank in (None, rank)


def _value(text: str) -> Any:
    words = {"true": True, "false": False}
    return words[text] if text in words else int(text) if text.isdigit() else text
