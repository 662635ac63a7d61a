"""Boot: which start of which host this process runs under."""

from __future__ import annotations

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """The kernel's, one for each time a host starts; empty where it has none to tell (not Linux, a strict sandbox).

    Two processes that read the same one share a kernel, and with it its file locks.
    """
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
