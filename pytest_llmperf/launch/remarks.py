"""Remarks: what libraries print of a slower way that they took, lifted from a rank's log. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

from pytest_llmperf.support.redaction import without_secrets

_WORDS = re.compile(
    r"\bfall(s|ing|en)?[ -]?back|\bfell back|\bfallback|\bnot installed|\bslow(er|ly)?\b|\bnaive\b|\bunoptimi[sz]ed"
    r"|\bnot (be )?(available|supported|compiled)|\bcould not (import|load|find)|\bfailed to (import|load)"
    r"|\bfast path\b|\bwill be disabled\b",
    re.IGNORECASE,
)

# torchrun's rank, glog's time and place, logging's level, a warning's file and line: another in each launch.
_HEAD = re.compile(
    r"^(\[rank\d+\]:?)?\s*(\[?[WIE]\d{4} [\d:. ]+\S*\s+\S+?\]\s*)?(\[?\d{4}-\d\d-\d\d[ T][\d:,.]+\]?\s*)?"
    r"(\S+:\d+: \w*Warning: |(WARNING|INFO|ERROR)\S*\s+)?"
)
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

_MOST_LINES, _MOST, _WIDTH = 20_000, 5, 240


def remarks_in(lines: Iterable[str]) -> tuple[str, ...]:
    """The first few of ``lines`` that tell of it, each once, without what differs from launch to launch."""
    plain = (_ANSI.sub("", line[: 10 * _WIDTH]) for line in islice(lines, _MOST_LINES))
    found = dict.fromkeys(_tidy(line) for line in plain if _WORDS.search(line))
    return tuple(islice(filter(None, found), _MOST))


def _tidy(line: str) -> str:
    plain = "".join(c if c.isprintable() else " " for c in line).strip()
    plain = without_secrets(_HEAD.sub("", plain))
    return plain if len(plain) <= _WIDTH else f"{plain[: _WIDTH - 3]}..."
