"""Acceptance of static figures: by the rules of other figures, only a reason replaces what moved. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pytest_llmperf.judge.static.step_store import Place
from pytest_llmperf.records.result import CaseResult

_MOST_FILES = 3


class _Tree(Protocol):
    """The tree that a run is of."""

    @property
    def changed(self) -> Sequence[str]: ...


def refusal(case: str, result: CaseResult, wanted: Sequence[Place], tree: _Tree, reason: str) -> str:
    """Why the step of ``result`` is not recorded at the ``wanted`` places; empty where it may be."""
    if reason or not any(place.stored for place in wanted):
        return ""
    if result.verdict in ("regressed", "changed"):
        word = "worse" if result.verdict == "regressed" else "another step"
        return f'{case}: {word} ({result.reason}); accept it with --perf-reason "why"'
    if tree.changed:
        more = f" and {len(tree.changed) - _MOST_FILES} more" if len(tree.changed) > _MOST_FILES else ""
        return (
            f"{case}: the working tree has uncommitted changes ({', '.join(tree.changed[:_MOST_FILES])}{more}); "
            "commit them, or say why with --perf-reason"
        )
    return ""
