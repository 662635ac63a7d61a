"""``python -m pytest_llmperf.worker FOLDER``: one rank of one launch, started by torchrun."""

from __future__ import annotations

import gc
import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from pytest_llmperf.support.garbage import uncollected
from pytest_llmperf.worker.failure_file import write_failure
from pytest_llmperf.worker.heartbeat import Heartbeat
from pytest_llmperf.worker.memory_limit import Headroom, lack_of_memory, watched
from pytest_llmperf.worker.refusal import RefusedError
from pytest_llmperf.worker.request import Request
from pytest_llmperf.worker.stack_dump import LastWords


def main(folder: Path) -> None:
    """Train what ``request.json`` asks for; rank 0 leaves ``launch.json``, a rank that fails its reason."""
    rank = int(os.environ["RANK"])
    words = LastWords(folder, rank)
    (folder / f"rank-{rank}.pid").write_text(str(os.getpid()), encoding="ascii")
    heartbeat = Heartbeat(folder, rank, words)
    headroom = Headroom()
    heartbeat.start()
    try:
        with ExitStack() as stack:
            _run(folder, rank, heartbeat, headroom, stack)
    except BaseException as error:
        with headroom.lifted():
            write_failure(folder, rank, error, *_kind(error, headroom))
        raise
    finally:
        heartbeat.stop()
        words.close()


def _kind(error: BaseException, headroom: Headroom) -> tuple[str, str]:
    """What kind of failure it is, and how that is known where ``error`` does not say so itself."""
    if isinstance(error, RefusedError):
        return "refused", ""
    lack = lack_of_memory(error, headroom)
    return ("error", "") if lack is None else ("oom", lack)


def _run(folder: Path, rank: int, heartbeat: Heartbeat, headroom: Headroom, stack: ExitStack) -> None:
    started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    request = Request.read(folder)
    spec = request.spec

    with uncollected():
        # Imported here: a rank that cannot import torch leaves its reason like any other.
        from pytest_llmperf.observe.device import is_gpu, own_device  # noqa: PLC0415
        from pytest_llmperf.settings.fault_injection import Injection  # noqa: PLC0415
        from pytest_llmperf.worker.batch_size_trials import try_sizes  # noqa: PLC0415
        from pytest_llmperf.worker.data import data_workers  # noqa: PLC0415
        from pytest_llmperf.worker.launch_record import Recorder  # noqa: PLC0415
        from pytest_llmperf.worker.train import train  # noqa: PLC0415

    heartbeat.enter("building")
    device, limit_bytes = own_device(), request.memory_limit_bytes
    if not is_gpu(device):
        stack.enter_context(watched(headroom, folder / f"room-{rank}.json", to_be_capped=bool(limit_bytes)))
    if limit_bytes:
        headroom.cap(device, limit_bytes)
    to_train = Injection.from_environment(spec.gpus).mutated(spec, rank)
    train_one = partial(train, request=request, device=device, beat=heartbeat)
    if request.search:
        try_sizes(to_train, request.search, train_one, folder, headroom)
        return
    if request.parity:
        # Imported here: no launch that measures needs it, and a record tells of the sources of all that was imported.
        from pytest_llmperf.worker.parity.parity_job import make_small_trainings  # noqa: PLC0415

        make_small_trainings(to_train, request.parity, request, device, heartbeat)
        _part()
        return
    recorder = Recorder(folder, rank, spec, started_at, device)
    with data_workers.told():  # of one that died a while ago, too
        recorder.finished(train_one(to_train, measured=recorder.measured))
    _part()


def _part() -> None:
    import torch.distributed as dist  # noqa: PLC0415

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    finally:
        gc.freeze()  # the interpreter's end looks through all that was imported for garbage, which is a second's work
