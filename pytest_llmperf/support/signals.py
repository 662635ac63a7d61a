"""Signals that end a run early as Ctrl-C does: what was found is told and written, and no launch is left behind."""

from __future__ import annotations

import signal
from collections.abc import Callable
from signal import Signals
from types import FrameType

#: What ends a SLURM job's run: scancel and preemption, and ``sbatch --signal``.
OF_A_JOB = (signal.SIGTERM, signal.SIGUSR1)
#: What a shell's ``kill``, ``timeout``, a CI runner or a container's stop sends.
OF_A_HOST = (signal.SIGTERM,)


def end_on(signals: tuple[Signals, ...], ended_by: Callable[[str], None]) -> Callable[[], None]:
    """Let ``signals`` end the run as Ctrl-C does, and tell ``ended_by`` which of them it was.

    One that is ignored, or that somebody else minds, is left so. Returns what makes all mean what they meant before.
    """

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


__all__ = ["OF_A_HOST", "OF_A_JOB", "Signals", "end_on"]
