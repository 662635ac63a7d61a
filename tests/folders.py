"""Which folders need what; tox.ini selects by folder and by marker, so the two agree."""

from __future__ import annotations

from collections.abc import Collection

NEED_TORCH = ("scripts", "slurm", "worker")


def out_of_place(folder: str, markers: Collection[str]) -> str:
    """Why a test with these markers in this folder would run nowhere, and where it belongs; empty if it would."""
    if ("slurm" in markers) != (folder == "slurm"):
        return "in tests/slurm every test is marked slurm, and no other is"
    if "torchrun" in markers and folder not in NEED_TORCH:
        return "marked torchrun; it belongs in tests/worker"
    return ""
