"""Reserved: options of pytest that the nightly job gives it. Said twice, the last alone would count, without a word."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

_JOB = "which the nightly job gives pytest itself"

#: Each with what says it instead.
RESERVED: Mapping[str, str] = {
    "-k": "of which pytest knows the last alone; say it as [suite] select",
    "--gpus": "which the nightly job gives pytest for each width; say them as [suite] gpus",
    **dict.fromkeys(("--perf-json", "--perf-resume", "--perf-width", "--perf-plan"), _JOB),
    "--perf-dry-run": "of which no night has results; see llmperf submit --dry-run",
}

# Of pytest and pytest-xdist: after these the rest of a word is the value.
_SHORT_WITH_VALUE = "cmnoprW"


def reserved_in(words: Sequence[str]) -> str | None:
    """The first of ``words`` that is reserved, however pytest lets it be written; ``None``: none is."""
    for word in words:
        if word == "--":  # what follows are paths
            return None
        name, _, value = word.removeprefix("-o").removeprefix("--override-ini=").lstrip("=").partition("=")
        if name == "addopts" and (inner := reserved_in(_words(value))):
            return inner
        option = word.partition("=")[0] if word.startswith("--") else _short(word)
        if option in RESERVED:
            return option
    return None


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _short(word: str) -> str:
    """``-k`` for ``-k``, ``-kx``, ``-k=x`` and ``-vk``; empty where it is not among the options of ``word``."""
    if not word.startswith("-"):
        return ""
    for letter in word[1:]:
        if f"-{letter}" in RESERVED:
            return f"-{letter}"
        if letter in _SHORT_WITH_VALUE:
            return ""
    return ""
