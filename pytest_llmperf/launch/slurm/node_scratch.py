"""A node's own folders: one for each step on it, and the caches that a job's launches share there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Names the folder that each node has for itself.
SCRATCH = "LLMPERF_SCRATCH"

# Compilers keep what they made here: on a shared file system every rank of every node would fight for it.
_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


@contextmanager
def scratch() -> Iterator[dict[str, str]]:
    """The variables that name them; empty where no folder can be made."""
    wanted = os.environ.get(SCRATCH) or os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - node-local by its nature
    home = Path(os.path.expandvars(wanted)) / f"llmperf-{os.getuid()}-{os.environ.get('SLURM_JOB_ID', '')}"
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = tempfile.mkdtemp(prefix="step-", dir=home)
    except OSError:
        yield {}
        return
    try:
        yield {"TMPDIR": folder} | {
            name: str(home / cache) for name, cache in _CACHES.items() if name not in os.environ
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
