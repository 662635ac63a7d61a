"""First on the path of a fork server whose ranks may each be another: a launch has what the file beside it changes.

What is changed is defined here, as an unlucky package's own ``sitecustomize`` would; no code of ours knows of it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_RANK = "pytest_llmperf.worker.__main__"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, _target: ModuleType | None = None) -> Any:
        if name != _RANK:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            main = module.main

            def patched(folder: Path) -> None:
                # Rates of a host are measured once, and not twenty times; cold launches do it as users' do.
                rates: Any = importlib.import_module("pytest_llmperf.observe.reference_work")
                own = rates._seconds
                rates._seconds = lambda work, device, repeats: own(work, device, min(1, repeats))
                if (patch := folder.parent / "patch.txt").exists():
                    name, _, source = patch.read_text().partition("\n")
                    exec(source, globals())
                    globals()["patch"](importlib.import_module(name))
                main(folder)

            module.main = patched

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
