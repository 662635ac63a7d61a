"""NumPy and SciPy, loaded at their first use: only a judged case pays for them. And one thread for their algebra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, TypeAlias

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
