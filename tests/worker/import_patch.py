"""A ``sitecustomize`` that changes a module behind everybody's back, as an unlucky package would."""

from __future__ import annotations

_AFTER_IMPORT = """
import importlib.abc, importlib.machinery, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != {module!r}:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            patch(module)
        spec.loader.exec_module = exec_module
        return spec

def patch(module):
    {patch}

sys.meta_path.insert(0, Finder())
"""


def after_import(module: str, patch: str) -> str:
    """The source of one that runs ``patch``, a line about ``module``, once that module was imported."""
    return _AFTER_IMPORT.format(module=module, patch=patch)
