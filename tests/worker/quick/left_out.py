"""Modules that are not imported: whoever asks for one gets an empty one, in which there is anything."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any


class _Nothing:
    """Whatever is asked of it, and a decorator that changes nothing."""

    def __call__(self, *given: Any, **_: Any) -> Any:
        return given[0] if given and callable(given[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __mro_entries__(self, _: Any) -> tuple[()]:
        return ()

    def __or__(self, _: Any) -> _Nothing:
        return self

    __ror__ = __getitem__ = __or__

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False


class _Empty(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _Unused(_Empty):
    """Of its classes nothing is an instance."""

    def __getattr__(self, name: str) -> Any:
        return type(name, (), {}) if name[:1].isupper() else super().__getattr__(name)


class _Loader(importlib.abc.Loader):
    def __init__(self, kind: type[ModuleType], others: Iterable[str]) -> None:
        self._kind, self._others = kind, others

    def create_module(self, spec: Any) -> ModuleType:
        return self._kind(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""
        del module
        for name in self._others:
            importlib.import_module(name)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, names: Iterable[str], kind: type[ModuleType], others: Iterable[str]) -> None:
        self._names, self._kind, self._others = frozenset(names), kind, others

    def find_spec(self, name: str, path: Any, _target: ModuleType | None = None) -> Any:
        parts = name.split(".")
        if self._names.isdisjoint(".".join(parts[:end]) for end in range(1, len(parts) + 1)):
            return None
        return importlib.machinery.ModuleSpec(name, _Loader(self._kind, self._others), is_package=True)


def leave_out(names: Iterable[str], *, with_classes: bool = False, importing: Iterable[str] = ()) -> None:
    """From now on, ``names`` and what is in them.

    ``with_classes``: somebody asks what is an instance of theirs. ``importing``: what they would import, and others ask
    for by its package.
    """
    sys.meta_path.insert(0, _Finder(names, _Unused if with_classes else _Empty, importing))
