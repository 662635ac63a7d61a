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
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from pytest_llmperf.observe import device as gpu
from pytest_llmperf.records.trace import LEADS_TO
from pytest_llmperf.support.redaction import without_secrets

_HOME, _WATCHING = Path(__file__).parents[1], (__file__, gpu.__file__)
_STDLIB = Path(os.__file__).resolve().parent
_INSTALLED = ("site-packages", "dist-packages")

# Of a tensor: what gives its content to Python, and what may make another one of the same content.
_ASKS = "item tolist numpy __bool__ __float__ __int__ __index__"
_COPIES = "to cpu cuda type float half bfloat16 double clone contiguous copy_"

# A line is read at a glance, and a file keeps so many of one kind.
_WIDTH, _MOST = 60, 20


class Project:
    """Whose code is the user's own: what is in the repository around ``folder`` and was not installed there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        above = (self.folder, *self.folder.parents)
        self.root = next((each for each in above if (each / ".git").exists()), self.folder)

    def name_of(self, file: str) -> str:
        """``file`` as seen from the folder; empty where it is not the project's."""
        path = Path(file).resolve()
        if file.startswith("<") or not path.is_relative_to(self.root) or path.is_relative_to(_STDLIB):
            return ""
        is_installed = {*_INSTALLED, _HOME.name}.intersection(path.relative_to(self.root).parts)
        return "" if is_installed else Path(os.path.relpath(path, self.folder)).as_posix()


class Places:
    """Those of one step, between ``begin`` and ``end``."""

    def __init__(self, device: torch.device, project: Project | None = None) -> None:
        self._on_gpu = gpu.is_gpu(device)
        self._name_of = functools.cache(project.name_of if project else lambda _: "")
        self._found: dict[str, Counter[str]] = {"wait": Counter(), "copy": Counter()}
        self._inside = threading.local()  # the kinds of the wrapped calls that a thread is in
        self._undo = ExitStack()

    def begin(self) -> None:
        asks = [(torch.Tensor, name) for name in _ASKS.split()]
        for owner, name in [(owner, "synchronize") for owner in gpu.WAITING] if self._on_gpu else asks:
            self._wrap(owner, name, "wait", lambda *_: True)
        for name in _COPIES.split():
            self._wrap(torch.Tensor, name, "copy", functools.partial(_is_copy, name, on_gpu=self._on_gpu))
        if self._on_gpu:
            self._undo.enter_context(gpu.heard_of_waits(self._waited))

    def end(self) -> None:
        """All is as it was before ``begin``."""
        self._undo.close()

    @property
    def found(self) -> dict[str, dict[str, float]]:
        """By kind and place how often, the most frequent ones; kinds that have none are absent."""
        most = {kind: found.most_common(_MOST) for kind, found in self._found.items() if found}
        return {kind: {place: float(count) for place, count in places} for kind, places in most.items()}

    def _waited(self) -> None:
        if not getattr(self._inside, "wait", False):
            self._found["wait"].update(self._here())

    def _wrap(self, owner: Any, name: str, kind: str, counts: Callable[..., bool]) -> None:
        function, is_own, inside = getattr(owner, name), name in vars(owner), self._inside

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if getattr(inside, kind, False):  # of nested calls the outermost counts
                return function(*args, **kwargs)
            setattr(inside, kind, True)
            try:
                result = function(*args, **kwargs)
            finally:
                setattr(inside, kind, False)
            if counts(result, args):
                self._found[kind].update(self._here())
            return result

        setattr(owner, name, watched)
        self._undo.callback(*((setattr, owner, name, function) if is_own else (delattr, owner, name)))

    def _here(self) -> list[str]:
        """The innermost line of the project, and the line of a package to which it led; our own calls have none."""
        inner, is_first = "", True
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - this thread's stack
        while frame is not None:
            top, file = str(frame.f_globals.get("__name__")).partition(".")[0], frame.f_code.co_filename
            is_ours = file.startswith(f"{_HOME}/")
            if is_ours and is_first and file not in _WATCHING:
                return []
            if not is_ours and top not in sys.stdlib_module_names:
                is_first = False
                own = "" if top == "torch" else self._name_of(file)
                if own:
                    return [LEADS_TO.join(filter(None, [_shown(own, frame), inner]))]
                if not inner and top != "torch" and not file.startswith("<"):
                    inner = _shown(_installed_name(file), frame)
            frame = frame.f_back
        return [inner] if inner else []


def _installed_name(file: str) -> str:
    """``file`` from its package on."""
    parts = Path(file).parts
    at = max((index for index, part in enumerate(parts) if part in _INSTALLED), default=len(parts) - 2)
    return "/".join(parts[at + 1 :])


def _shown(name: str, frame: FrameType) -> str:
    text = without_secrets(" ".join(linecache.getline(frame.f_code.co_filename, frame.f_lineno).split()))
    text = text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
    return f"{name}:{frame.f_lineno} {text}".rstrip()


def _is_copy(name: str, result: Any, args: tuple[Any, ...], *, on_gpu: bool) -> bool:
    """Whether another tensor has the content now, of a GPU on another device: a change of type is a kernel there."""
    source = args[1] if name == "copy_" and len(args) > 1 else args[0]
    if not (isinstance(result, torch.Tensor) and isinstance(source, torch.Tensor)):
        return False
    return source.device != result.device if on_gpu else result is not source
