"""A ``sitecustomize`` that changes a module behind everybody's back, as an unlucky package would."""

from __future__ import annotations

from pathlib import Path

from tests.worker.user import LIGHT, QUICK

_PATCH = """
def patch(module):
    {patch}
"""

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

sys.meta_path.insert(0, Finder())
"""

#: As ``LIGHT_PATH``, in a sitecustomize of the test's own.
LIGHT_TOO = f"""
import importlib.util
of_light = importlib.util.spec_from_file_location("light", {str(LIGHT / "sitecustomize.py")!r})
light = importlib.util.module_from_spec(of_light)
of_light.loader.exec_module(light)
"""

#: As ``QUICK``, in a sitecustomize of the test's own.
QUICK_TOO = f"import runpy, sys\nsys.path.append({str(QUICK)!r})\nrunpy.run_path({str(QUICK / 'sitecustomize.py')!r})\n"

# accelerate shards over GPUs alone, and trains with DDP elsewhere without a word: here it is told that these are GPUs.
_AS_ON_GPUS = """import {module} as asks
    own = asks.training_arguments
    def sharding(*what):
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType
        arguments = own(*what)
        _ = arguments.device  # makes the state
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        return arguments
    asks.training_arguments = sharding"""

_PATCHABLE = Path(__file__).with_name("patchable")
#: First on the path of launches that may have a patch of their own.
PATCHABLE_PATH = f"{_PATCHABLE}:{_PATCHABLE.parents[2]}"


def after_import(module: str, patch: str) -> str:
    """The source of one that runs ``patch``, a line about ``module``, once that module was imported."""
    return _PATCH.format(patch=patch) + _AFTER_IMPORT.format(module=module)


def in_the_rank(folder: Path, module: str, patch: str) -> dict[str, str]:
    """For a launch in a folder below ``folder``: variables by which ``patch`` is run as its rank begins.

    They are the same for all: such launches are forked from one server, which has imported what they change.
    """
    (folder / "patch.txt").write_text(f"{module}\n{_PATCH.format(patch=patch)}", encoding="utf-8")
    return {"PYTHONPATH": PATCHABLE_PATH}


def as_on_gpus(module: str = "pytest_llmperf.worker.recipes.huggingface.trainer") -> str:
    """A patch by which what ``module`` trains is sharded on the CPU too."""
    return _AS_ON_GPUS.format(module=module)
