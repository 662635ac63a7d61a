"""Run by Python at its start in each process of a launched command: waits for torch, and lets its training be watched.

Its folder is on PYTHONPATH alone and holds nothing else. Until torch is there only the standard library is imported.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FOLDER = "LLMPERF_SCRIPT"


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
    """A finder that finds nothing, and hears when torch has been imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        loader = getattr(spec, "loader", None)
        if loader is not None:
            execute = loader.exec_module

            def executed(module: Any) -> None:
                execute(module)
                _arrived()

            loader.exec_module = executed
        return spec


def _arrived() -> None:
    folder = os.environ[_FOLDER]
    try:
        # Found before any other version of it; what it needs comes after all that the command has itself.
        package, libraries = os.path.join(folder, "package"), os.path.join(folder, "libraries")
        sys.path.insert(0, package)
        sys.path.append(libraries)
        try:
            from pytest_llmperf.worker.script.rank import watch
        finally:
            sys.path.remove(package)
        watch(folder)
    except Exception as error:
        _fail(folder, error)


def _fail(folder: str, error: BaseException) -> None:
    import json
    import time

    why = f"the training cannot be watched: {type(error).__name__}: {error}"
    message = f"{why}; expected msgspec and psutil beside {sys.executable}: install pytest-llmperf there"
    failure = {"kind": "refused", "message": message, "tail": [], "time": time.time()}
    with open(os.path.join(folder, "failure-0.json"), "w") as file:
        json.dump(failure, file)


if os.environ.get(_FOLDER):
    sys.meta_path.insert(0, _WaitsForTorch())
try:
    _chain()
except Exception:
    import traceback

    traceback.print_exc()  # as Python's own site does with one that fails
