"""ParityOrder: which small trainings a launch makes instead of the one that is measured."""

from __future__ import annotations

from dataclasses import dataclass

#: Trainings of the plain form, each with weights and rows of its own, from which the measure of its rounding is taken;
#: and of these as many as are made of a spec beside them.
SEEDS, BESIDE = 5, 3


@dataclass(frozen=True, kw_only=True)
class ParityOrder:
    """The plain form's truth and rounding, or one training beside that truth."""

    truth: str = ""
    """The folder of the launch that left it; empty: this launch makes it."""
    shrinks: float = 1.0
    """How long a sliding window is in the small model beside that in the measured one, as its sequences are."""
    gathered: str = "no"
    """In which type the plain form's weights are used, where that is another than theirs and there is no autocast."""
