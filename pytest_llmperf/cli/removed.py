"""Commands and options that are gone: each answers in one line that says what to use instead."""

from __future__ import annotations

from collections.abc import Sequence

#: By a command, or by a command and one of its words; a key's first word is the command.
_REMOVED = {
    "predict": "measure the width instead: pytest --gpus N; `llmperf report --tables` has its efficiency",
}


def refusal(argv: Sequence[str]) -> str:
    """Why nothing answers to ``argv``, in one line; empty where all of it may still be asked."""
    command, *words = argv or [""]
    asked = [command, *(f"{command} {word.partition('=')[0]}" for word in words)]
    gone = next((name for name in asked if name in _REMOVED), None)
    return f"{gone!r} was removed: {_REMOVED[gone]}" if gone else ""
