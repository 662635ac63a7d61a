"""Lineage: what Linux does to a process when the one that forked it ends, and who takes its orphans."""

from __future__ import annotations

import ctypes
import os
from signal import Signals

# Source: linux/prctl.h.
_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36


def die_with(parent: int, signal: Signals) -> None:
    """Get ``signal`` as soon as the thread of ``parent`` that forked this process ends; at once where it has."""
    _prctl(_SET_PDEATHSIG, signal)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal)


def outlive_parent() -> None:
    """Take ``die_with`` back."""
    _prctl(_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of what descends from here and has lost its own: whoever reaps them is known then."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
