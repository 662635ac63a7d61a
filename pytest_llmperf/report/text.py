"""Text that has to fit: one line, a terminal's width, an output's encoding."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pytest_llmperf.support.redaction import without_secrets

# Where a line that is too long may break: after a space, then inside an id, then anywhere.
_BREAKS = (r"(?<= )", r"(?<=[-/:=,])")
# Between what a list has.
_PARTS = re.compile(r"(?<=[,;]) ")


@dataclass(frozen=True)
class Glyphs:
    """The marks outside ASCII that the reports use, and what stands for them elsewhere."""

    dot: str
    ellipsis: str


UNICODE = Glyphs(dot="·", ellipsis="…")
ASCII = Glyphs(dot="|", ellipsis="...")


def glyphs_of(encoding: str | None) -> Glyphs:
    """The marks that an output of this encoding can show; an unknown encoding shows ASCII."""
    try:
        (UNICODE.dot + UNICODE.ellipsis).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def one_line(text: str, encoding: str | None = "utf-8") -> str:
    """``text`` as it may leave, without line breaks, and escaped where ``encoding`` cannot show it.

    An id or an exception's message must not move the cursor, start a colour or end the run with a UnicodeEncodeError.
    """
    line = leaving(text).replace("\n", " ").strip()
    try:
        return line.encode(encoding or "ascii", "backslashreplace").decode(encoding or "ascii")
    except LookupError:
        return line.encode("ascii", "backslashreplace").decode("ascii")


def leaving(text: str) -> str:
    """``text`` as it may leave, its lines kept: without secrets, and without what moves a cursor or turns words round.

    Every string that somebody else reads goes through here, or through ``one_line``.
    """
    text = without_secrets(text)
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def fold(text: str, width: int | None, indent: str = "") -> list[str]:
    """``text`` in lines of at most ``width``, those after the first indented; nothing is lost but spaces at a break."""
    if width is None or len(text) <= width:
        return [text] if text else []
    width = max(width, 1)
    indent = indent if len(indent) < width // 2 else ""
    lines: list[str] = []
    rest = text
    while rest:
        lead = indent if lines else ""
        head = _head(rest, width - len(lead))
        lines.append((lead + head).rstrip())
        rest = rest[len(head) :].lstrip(" ")
    return lines


def _head(text: str, width: int) -> str:
    """As much of ``text`` as one line holds."""
    if len(text) <= width:
        return text
    for pattern in _BREAKS:
        # One more character: the space at the break itself need not fit.
        ends = [match.start() for match in re.finditer(pattern, text[: width + 1])]
        fitting = [end for end in ends if 0 < len(text[:end].rstrip()) <= width]
        if fitting:
            return text[: fitting[-1]]
    return text[:width]


def shorten_middle(text: str, width: int, ellipsis: str) -> str:
    """``text`` in ``width`` characters, its two ends kept: an id differs at its end as often as at its start."""
    if len(text) <= width:
        return text
    if width <= len(ellipsis) + 1:
        return text[: max(width, 0)]
    kept = width - len(ellipsis)
    tail = kept // 2
    return text[: kept - tail] + ellipsis + (text[-tail:] if tail else "")


def shorten_list(text: str, width: int, ellipsis: str) -> str:
    """``text`` in ``width`` characters, whole parts of a list left out of its middle: half of one says another thing.

    Parts end with a comma or semicolon. Where the first and the last have no room together, the text's ends are kept.
    """
    if len(text) <= width:
        return text
    first, *middle = _PARTS.split(text)
    end = f" {ellipsis} {middle.pop()}" if middle else ""
    if not end or len(first + end) > width:
        return shorten_middle(text, width, ellipsis)
    kept = first
    for part in middle:
        if len(f"{kept} {part}{end}") > width:
            break
        kept = f"{kept} {part}"
    return kept + end
