"""Run by Python at its start in each process of a command: waits for torch, and lets its training be watched.

Its folder is on PYTHONPATH alone and holds nothing else; or a ``.pth`` runs it, by another name. Until torch is there
only the standard library is imported."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Each names a folder: that of a launch, which ends the command; and where a real run leaves its row of history.
_LAUNCHED, _OBSERVED = "LLMPERF_SCRIPT", "LLMPERF_OBSERVE"


def _chain() -> None:
    """Run the user's own sitecustomize, which this file stands before."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.dirname(os.path.realpath(__file__))
    rest = [path for path in sys.path if os.path.realpath(path or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


class _WaitsForTorch:
    """A finder that finds nothing of its own, and hears when torch has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch":
            return None
        # Whoever only asks whether there is a torch gets the same spec, and nothing has happened.
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((one for one in found if one is not None), None)
        if (loader := getattr(spec, "loader", None)) is not None:
            execute = loader.exec_module

            def executed(module: Any) -> None:
                del loader.exec_module  # it is again as it was: code may ask for its source, or pickle it
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _arrived()

            loader.exec_module = executed
        return spec


def _seen(what: str) -> None:
    """Tell the launcher that this process can be watched, and what of its training has begun."""
    try:
        with open(os.path.join(os.environ[_LAUNCHED], f"seen-{os.getpid()}"), "w") as file:
            file.write(what)
    except OSError:  # its launch is over
        pass


def _arrived() -> None:
    folder = os.environ[_LAUNCHED if _is_launched else _OBSERVED]
    if _is_launched:
        _seen("torch")
    try:
        # Found before any other version of it; what it needs comes after all that the command has itself.
        package, libraries = os.path.join(folder, "package"), os.path.join(folder, "libraries")
        sys.path.insert(0, package)
        sys.path.append(libraries)
        try:
            if _is_launched:
                from pytest_llmperf.worker.script.torch_hooks import watch
            else:
                from pytest_llmperf.worker.script.production import watch
        finally:
            sys.path.remove(package)
        watch(folder)
    except Exception as error:
        _fail(folder, error) if _is_launched else sys.stderr.write(f"llmperf: this run is not watched: {error!r}\n")


def _fail(folder: str, error: BaseException) -> None:
    import json
    import time

    message = f"the training cannot be watched: {type(error).__name__}: {error}; expected Python 3.10 or later with "
    message += f"msgspec and psutil: install pytest-llmperf for {sys.executable}"
    with open(os.path.join(folder, "failure-0.json"), "w") as file:
        json.dump({"kind": "refused", "message": message, "tail": [], "time": time.time()}, file)


def _untold() -> None:
    """Say at the end of the command's own process why there is no row."""
    if any(isinstance(one, _WaitsForTorch) for one in sys.meta_path):
        sys.stderr.write("llmperf: no row: this process imported no torch\n")


_is_launched = bool(os.environ.get(_LAUNCHED))
if _is_launched:
    _seen("hook")
elif os.environ.get(_OBSERVED, "").endswith(f"-{os.getpid()}"):  # by which its folder is named
    import atexit

    atexit.register(_untold)
_is_there = any(type(one).__name__ == _WaitsForTorch.__name__ for one in sys.meta_path)
if (_is_launched or os.environ.get(_OBSERVED)) and not _is_there:
    sys.meta_path.insert(0, _WaitsForTorch())
try:
    if __name__ == "sitecustomize":
        _chain()
except Exception:
    import traceback

    traceback.print_exc()  # as Python's own site does with one that fails
