"""Places: the lines of Python at which one step asks for a tensor's content, waits for its device, or copies.

The last traced step alone is looked at: nobody times it, and its device does nothing more. PyTorch warns of what waits
for a GPU. Functions of which it does not warn, and those that copy, are wrapped meanwhile. Nothing waits on the CPU;
there the functions that ask for a tensor's content are wrapped.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from pytest_llmperf.observe import device as gpu
from pytest_llmperf.support.redaction import without_secrets

_OURS = __name__.partition(".")[0]
_STDLIB = Path(os.__file__).resolve().parent
_INSTALLED = ("site-packages", "dist-packages")

# Of a tensor: what gives its content to Python, and what may make another one of the same content.
_ASKS = "item tolist numpy __bool__ __float__ __int__ __index__"
_COPIES = "to cpu cuda type float half bfloat16 double clone contiguous copy_"

# A line is read at a glance, and a file keeps so many of one kind.
_WIDTH, _MOST = 60, 20


@dataclass(frozen=True)
class Project:
    """Whose code is the user's own: what is in their repository and was not installed there."""

    folder: Path
    """The command's."""
    root: Path

    @classmethod
    def around(cls, folder: Path) -> Project:
        folder = folder.resolve()
        return cls(folder, next((each for each in (folder, *folder.parents) if (each / ".git").exists()), folder))

    def name_of(self, file: str) -> str:
        """``file`` as seen from the command's folder; empty where it is not the project's."""
        path = Path(file).resolve()
        if not path.is_relative_to(self.root) or path.is_relative_to(_STDLIB):
            return ""
        if {*_INSTALLED, _OURS}.intersection(path.relative_to(self.root).parts):
            return ""
        return Path(os.path.relpath(path, self.folder)).as_posix()


class Places:
    """Those of one step, between ``begin`` and ``end``."""

    def __init__(self, device: torch.device, project: Project | None = None) -> None:
        self._on_gpu = gpu.is_gpu(device)
        self._name_of = functools.cache(project.name_of if project else lambda _: "")
        self._found: dict[str, Counter[str]] = {"wait": Counter(), "copy": Counter()}
        self._inside = threading.local()  # the kinds of the wrapped calls that a thread is in
        self._undo = ExitStack()

    def begin(self) -> None:
        is_copy = _is_copy_to_device if self._on_gpu else _is_copy
        for name in _COPIES.split():
            self._wrap(torch.Tensor, name, "copy", functools.partial(is_copy, name))
        if not self._on_gpu:
            for name in _ASKS.split():
                self._wrap(torch.Tensor, name, "wait")
            return
        for owner in gpu.WAITING:
            self._wrap(owner, "synchronize", "wait")
        self._undo.enter_context(warnings.catch_warnings())
        self._undo.enter_context(gpu.warns_of_waits())
        show = warnings.showwarning

        def seen(message: Warning | str, *args: Any, **kwargs: Any) -> None:
            if gpu.WAIT_WARNING not in str(message):
                show(message, *args, **kwargs)
            elif not getattr(self._inside, "wait", False):
                self._note("wait")

        warnings.showwarning = seen

    def end(self) -> None:
        """All is as it was before ``begin``."""
        self._undo.close()

    @property
    def found(self) -> dict[str, dict[str, float]]:
        """By kind and place how often, the most frequent ones; kinds that have none are absent."""
        kinds = (
            (kind, sorted(found.items(), key=lambda each: (-each[1], each[0]))) for kind, found in self._found.items()
        )
        return {kind: {place: float(count) for place, count in most[:_MOST]} for kind, most in kinds if most}

    def _wrap(self, owner: Any, name: str, kind: str, counts: Callable[..., bool] = lambda *_: True) -> None:
        function, is_own = getattr(owner, name), name in vars(owner)
        inside = self._inside

        @functools.wraps(function)
        def seen(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, kind, False):  # of nested calls the outermost counts
                return function(*args, **kwargs)
            setattr(inside, kind, True)
            try:
                result = function(*args, **kwargs)
            finally:
                setattr(inside, kind, False)
            if counts(result, args):
                self._note(kind)
            return result

        setattr(owner, name, seen)
        self._undo.callback(*((setattr, owner, name, function) if is_own else (delattr, owner, name)))

    def _note(self, kind: str) -> None:
        """A call of ``kind`` has come from whoever called the one that calls this."""
        place = self._place(sys._getframe(2))  # noqa: SLF001 - the stack of this thread, and nothing else of it
        if place:
            self._found[kind][place] += 1

    def _place(self, frame: FrameType | None) -> str:
        """The innermost line of the project; else of who is neither torch nor we. Our own calls have none."""
        inner, is_innermost = "", True
        while frame is not None:
            top = _module_of(frame).partition(".")[0]
            if top == _OURS and is_innermost and frame.f_code.co_name != "seen":
                return ""
            if top not in (_OURS, "torch"):
                file = frame.f_code.co_filename
                own = self._name_of(file)
                if own:
                    return _shown(own, file, frame.f_lineno)
                if not inner and top not in sys.stdlib_module_names and not file.startswith("<"):
                    inner = _shown(_installed_name(file), file, frame.f_lineno)
            is_innermost = is_innermost and top in sys.stdlib_module_names
            frame = frame.f_back
        return inner


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__package__") or frame.f_globals.get("__name__") or "")


def _installed_name(file: str) -> str:
    """``file`` from its package on."""
    parts = Path(file).parts
    at = max((index for index, part in enumerate(parts) if part in _INSTALLED), default=len(parts) - 2)
    return "/".join(parts[at + 1 :])


def _shown(name: str, file: str, line: int) -> str:
    text = without_secrets(" ".join(linecache.getline(file, line).split()))
    text = text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
    return f"{name}:{line} {text}".rstrip()


def _is_copy(name: str, result: Any, args: tuple[Any, ...]) -> bool:
    """Whether another tensor has the content now."""
    return isinstance(result, torch.Tensor) and (name == "copy_" or result is not args[0])


def _is_copy_to_device(name: str, result: Any, args: tuple[Any, ...]) -> bool:
    """Whether its bytes went as they are: to another device, or into another tensor; a change of type is a kernel."""
    if not _is_copy(name, result, args):
        return False
    source = args[1] if name == "copy_" and len(args) > 1 else args[0]
    if not isinstance(source, torch.Tensor) or source.device != result.device:
        return isinstance(source, torch.Tensor)
    whole = source.is_contiguous() and result.is_contiguous()
    return name in ("clone", "copy_") and whole and source.dtype == result.dtype
