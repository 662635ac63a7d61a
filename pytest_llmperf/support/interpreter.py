"""What holds for this whole process: signals that end a run early, garbage, and NumPy, loaded at its first use."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from signal import Signals
from types import FrameType
from typing import Any, TypeAlias

#: What ends a SLURM job's run: scancel and preemption, and ``sbatch --signal``.
OF_A_JOB = (signal.SIGTERM, signal.SIGUSR1)
#: What a shell's ``kill``, ``timeout``, a CI runner or a container's stop sends.
OF_A_HOST = (signal.SIGTERM,)


def end_on(signals: tuple[Signals, ...], ended_by: Callable[[str], None]) -> Callable[[], None]:
    """``signals`` end the run as Ctrl-C does, ``ended_by`` hears which; others' are left. Returns what undoes it."""

    def handler(number: int, _frame: FrameType | None) -> None:
        for known in minded:
            signal.signal(known, signal.SIG_IGN)  # SLURM repeats itself, and the ending must come to its end
        ended_by(Signals(number).name)
        raise KeyboardInterrupt(Signals(number).name)

    minded = [known for known in signals if signal.getsignal(known) is signal.SIG_DFL]
    try:
        for known in minded:
            signal.signal(known, handler)
    except ValueError:  # not the main thread: whoever embeds pytest there minds its signals
        return lambda: None

    def restore() -> None:
        for known in minded:
            signal.signal(known, signal.SIG_DFL)

    return restore


@contextmanager
def uncollected() -> Iterator[None]:
    """For imports: to look through their objects, which stay, is a fifth of their time. Nothing is left of it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()
            gc.unfreeze()  # into the oldest generation: the next object would else be a reason to look through them
            gc.enable()


#: One of NumPy, which counts as Any.
Array: TypeAlias = Any


class _Module:
    """A module that is imported when something in it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self._name), name)
        setattr(self, name, value)  # it is asked for once
        return value


np: Any = _Module("numpy")
special: Any = _Module("scipy.special")
sparse: Any = _Module("scipy.sparse")


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for what NumPy computes inside: several take a hundred times as long where all cores train."""
    with _controller().limit(limits=1, user_api="blas"):
        yield


@cache
def _controller() -> Any:
    import_module("numpy")  # what is not loaded by then is not found
    return import_module("threadpoolctl").ThreadpoolController()
