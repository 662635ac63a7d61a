"""``python -m pytest_llmperf.worker FOLDER``: one rank of one launch, started by torchrun."""

from __future__ import annotations

import gc
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from pytest_llmperf.observe.vital_signs import Headroom, Heartbeat, LastWords
from pytest_llmperf.records.failure import lack_of_memory
from pytest_llmperf.records.ranks import RefusedError, Request, write_failure
from pytest_llmperf.support.interpreter import uncollected


def main(folder: Path) -> None:
    """Do what ``request.json`` asks for; rank 0 leaves ``launch.json``, a rank that fails its reason."""
    rank = int(os.environ["RANK"])
    words = LastWords(folder, rank)
    (folder / f"rank-{rank}.pid").write_text(str(os.getpid()), encoding="ascii")
    heartbeat = Heartbeat(folder, rank, words)
    headroom = Headroom()
    heartbeat.start()
    try:
        started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        request = Request.read(folder)
        # A fork has imported it: to unfreeze what its server has frozen costs a collection of half a second.
        with nullcontext() if f"{__package__}.rank_job" in sys.modules else uncollected():
            # Imported here: a rank that cannot import torch leaves its reason like any other.
            from pytest_llmperf.worker import rank_job  # noqa: PLC0415

            recipe = rank_job.recipe_of(request)
        rank_job.run(request, recipe, rank, started_at, heartbeat, headroom)
    except BaseException as error:
        with headroom.lifted():
            if isinstance(error, RefusedError):
                write_failure(folder, rank, error, "refused")
            else:
                lack = lack_of_memory(error, headroom.after)
                write_failure(folder, rank, error, "error" if lack is None else "oom", lack or "")
        raise
    finally:
        heartbeat.stop()
        words.close()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    finally:
        gc.freeze()  # the interpreter's end looks through all that was imported for garbage, which is a second's work
