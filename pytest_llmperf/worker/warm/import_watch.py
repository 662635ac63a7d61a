"""Watching what imports do to a process that is to be forked: which module's code made it unfit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader, SourceFileLoader
from types import ModuleType
from typing import Any


class ImportWatch:
    """Looks after each module's code has run; the innermost module is the one to be named."""

    def __init__(self, is_unfit: Callable[[], bool]) -> None:
        self._is_unfit = is_unfit
        self.culprit = ""
        """The module whose code made this process unfit, while it is; empty where no module's did."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts. Loaders are what they were afterwards: no module keeps a trace of it."""
        before = {kind: vars(kind).get("exec_module") for kind in (SourceFileLoader, ExtensionFileLoader)}
        for kind in before:
            setattr(kind, "exec_module", self._watched(kind.exec_module))  # noqa: B010 - to mypy a method stays
        try:
            yield
        finally:
            for kind, own in before.items():
                if own is None:
                    delattr(kind, "exec_module")
                else:
                    setattr(kind, "exec_module", own)  # noqa: B010

    def _watched(self, execute: Any) -> Any:
        def exec_module(loader: Any, module: ModuleType) -> None:
            was_unfit = self._is_unfit()  # before anything was watched, or by nobody's code
            try:
                execute(loader, module)
            finally:
                if not self._is_unfit():
                    self.culprit = ""  # what it started has ended again
                elif not self.culprit and not was_unfit:
                    self.culprit = module.__name__

        return exec_module
