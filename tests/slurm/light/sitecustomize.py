"""First on a job's path: its ranks have another trainer, a loop of plain PyTorch that imports no transformers.

What becomes of a lost node is SLURM's, torchrun's and ours to settle, not the model's; and most of a launch
would be the imports of what this leaves out.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).parent
_IN_PLACE = {
    "pytest_llmperf.worker.recipes.huggingface": _HERE / "light_train.py",
}
_PRELOAD = "pytest_llmperf.worker.imports"
# Of torch's import the half that a loop on the CPU needs nothing of: compilers, quantized layers, shapes without data.
_UNUSED = tuple(
    f"torch.{name}"
    for name in (
        "_decomp _export _functorch _higher_order_ops _lobpcg _logging _meta_registrations _native _precompile "
        "_prims _prims_common _refs ao compiler.precompile distributions export fft func hub jit linalg masked "
        "nn.attention nn.intrinsic nn.qat nn.quantizable nn.quantized onnx optim package profiler quantization "
        "signal sparse special testing utils.data"
    ).split()
)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, _target: ModuleType | None = None) -> Any:
        if name in _IN_PLACE:
            return importlib.util.spec_from_file_location(name, _IN_PLACE[name])
        if name != _PRELOAD:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            module.EVERY_RANK = tuple(each for each in module.EVERY_RANK if each != "transformers")
            module.import_needs = lambda _: None

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# By its path, as whoever runs this may have another folder first on his.
_spec = importlib.util.spec_from_file_location("left_out", _HERE.parents[1] / "worker" / "quick" / "left_out.py")
assert _spec is not None
assert _spec.loader is not None
_left_out = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_left_out)
_left_out.leave_out(_UNUSED)
sys.meta_path.insert(0, _Finder())
