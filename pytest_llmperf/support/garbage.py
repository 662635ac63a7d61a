"""What collects garbage, kept from looking where there is none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """For imports: they make objects that stay, and to look through them, again and again, is a fifth of their time.

    Nothing is left of it: all that there is is old then, and the Trainer collects it once before its first step.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()
            gc.unfreeze()  # into the oldest generation: the next object would else be a reason to look through them
            gc.enable()
