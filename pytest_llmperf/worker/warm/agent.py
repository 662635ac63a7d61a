"""One warm launch: torchrun's agent in a process that was forked for it, and the ranks that it forks.

What a fresh process would not have is taken back here: signals, descriptors, random state, the environment."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import mmap
import os
import random
import re
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_llmperf.worker.warm.gpu_answers import no_gpus

# torchrun asks ten times a second by itself; a rank that has ended waits for that.
_MONITOR_SECONDS = 0.05

_TORCHRUNS_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

# Source: c10/core/GeneratorImpl.h, default_rng_seed_val: what torch begins with in every process.
_TORCHS_SEED = 67280421310721


@dataclass(frozen=True)
class Order:
    torchrun: Sequence[str]
    """torchrun's options, the worker's module and its folder."""
    environment: Mapping[str, str]
    pages: Sequence[Run]
    """Of files, which a fresh process would have read."""


def run_agent(order: Order, log: int, server: int) -> int:
    """Run torchrun in this process, which ``server`` forked, with its output in ``log``; torchrun's exit code."""
    os.setsid()
    die_with(server, signal.SIGTERM)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a descriptor is wanted
        os.dup2(nothing.fileno(), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(order.environment)
    tempfile.tempdir = None  # what was found by another environment
    try:
        _torchrun(order)
        return 0
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - a fresh interpreter would end like this too
        _tell_error()
        return 1
    finally:
        flush()


def _torchrun(order: Order) -> None:
    """As ``python -m torch.distributed.run …``, with a function in the place of a command."""
    from torch.distributed import run  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import record  # noqa: PLC0415
    from torch.distributed.launcher.api import elastic_launch  # noqa: PLC0415

    sys.argv = ["-m", *order.torchrun]
    arguments = run.parse_args(["--start-method=fork", f"--monitor-interval={_MONITOR_SECONDS}", *order.torchrun])
    if arguments.standalone:  # as torchrun understands it
        arguments.rdzv_backend, arguments.rdzv_endpoint = "c10d", "localhost:0"
        arguments.rdzv_id = str(uuid.uuid4())
    _hurry(alone=arguments.standalone)
    _end_with_the_ranks()
    with no_gpus():
        config, _, _ = run.config_from_args(arguments)
    record(lambda: elastic_launch(config, run_rank)(order, os.getpid()))()


def _hurry(*, alone: bool) -> None:
    """Leave out what costs torchrun a second beside so many modules: another version may have neither. For each line of
    its log it looks for its own name in all sources, and it waits lest all nodes come at once."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous  # noqa: PLC0415

    rendezvous: Any = dynamic_rendezvous
    if hasattr(rendezvous, "get_method_name"):
        rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name  # noqa: SLF001
    if alone and hasattr(rendezvous, "_delay"):
        own = rendezvous._delay  # noqa: SLF001
        rendezvous._delay = lambda seconds: None if isinstance(seconds, tuple) else own(seconds)  # noqa: SLF001


def _end_with_the_ranks() -> None:
    """Take a rank that has ended with 0 for one that ended well; of a function torchrun waits for what that returns."""
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext  # noqa: PLC0415

    context: Any = MultiprocessContext
    own = context._poll  # noqa: SLF001

    def _poll(ranks: Any) -> Any:
        for number, process in enumerate(ranks._pc.processes):  # noqa: SLF001
            if process.exitcode == 0:  # one that has returned does not end before all have
                ranks._return_values.setdefault(number, None)  # noqa: SLF001
        return own(ranks)

    context._poll = _poll  # noqa: SLF001


def run_rank(order: Order, agent: int) -> None:
    import numpy as np  # noqa: PLC0415 - all of this was imported by the server
    import torch  # noqa: PLC0415

    from pytest_llmperf.worker.__main__ import main  # noqa: PLC0415

    os.setsid()  # as torchrun gives each command one
    # Sooner than the heartbeat would see it, and without a reason left behind that is none.
    die_with(agent, signal.SIGKILL)
    for number in _TORCHRUNS_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Torchrun's connections, of its store above all; pipes are how a rank's end is told, and files are its logs.
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are numbers
        with suppress(OSError):  # the folder's own, which is closed by now
            if os.readlink(f"/proc/self/fd/{name}").startswith(("socket:", "anon_inode:")):  # noqa: PTH115
                os.close(int(name))
    faulthandler.disable()  # switched on for whom torchrun calls, and for no command
    # What the server drew at random would be the same for all.
    random.seed()
    np.random.seed()
    torch.default_generator.manual_seed(_TORCHS_SEED)
    read_pages(order.pages)
    folder = order.torchrun[-1]
    sys.argv = ["-m", folder]
    try:
        main(Path(folder))
    except KeyboardInterrupt:  # torch takes it for a good end
        _tell_error()
        flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except SystemExit:
        raise
    except BaseException:
        _tell_error()  # here, while standard error is the rank's own log
        raise
    finally:
        run_handlers: Any = atexit._run_exitfuncs  # noqa: SLF001 - a fork runs none at its end, and there is no other way
        run_handlers()
        flush()


def _tell_error() -> None:
    """As an interpreter would; torch has a hook there, which names the rank."""
    kind, error, trace = sys.exc_info()
    if kind is not None and error is not None:
        sys.excepthook(kind, error, trace)


def flush() -> None:
    """Leave nothing in this process that a fork would write too."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


# Source: linux/prctl.h.
SET_PDEATHSIG = 1
SET_CHILD_SUBREAPER = 36


def die_with(parent: int, number: signal.Signals) -> None:
    """Get signal ``number`` as soon as the thread of ``parent`` that forked this process ends; at once where it has."""
    prctl(SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


# Source: asm-generic/mman-common.h; Linux 5.14. An older one leaves pages to be read when they are needed.
_MADV_POPULATE_READ = 22

# Source: Documentation/admin-guide/mm/pagemap.rst: one word a page, its top bit says that the page is there.
_WORD = 8
_PRESENT = re.compile(rb"[\x80-\xff]+")

#: Addresses: where a run of pages begins, and where it ends.
Run = tuple[int, int]


def resident_runs() -> tuple[Run, ...]:
    """Pages of files that are resident in this process: a fork begins without them, which are a CPU rank's memory."""
    found: list[Run] = []
    with suppress(OSError), Path("/proc/self/pagemap").open("rb") as pagemap:
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            words = line.split(maxsplit=5)
            if len(words) < 6 or not words[5].startswith("/") or not words[1].startswith("r"):  # noqa: PLR2004 - a name
                continue
            with suppress(ValueError):
                start, end = (int(word, 16) for word in words[0].split("-"))
                pagemap.seek(start // mmap.PAGESIZE * _WORD)
                present = pagemap.read((end - start) // mmap.PAGESIZE * _WORD)
                runs = _PRESENT.finditer(present[_WORD - 1 :: _WORD])  # of each its highest byte
                found += [(start + run.start() * mmap.PAGESIZE, start + run.end() * mmap.PAGESIZE) for run in runs]
        return tuple(found)
    return ()


def read_pages(runs: Iterable[Run]) -> None:
    """Make them resident here too, where the same files are mapped in the same places: in a fork."""
    madvise = ctypes.CDLL(None).madvise
    for start, end in runs:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_POPULATE_READ)
