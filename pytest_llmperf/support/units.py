"""Units."""

from __future__ import annotations

#: Bytes.
GIB = 2**30
