"""What every rank imports, what a launch's spec makes it import, and where all of that came from."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

#: What each rank of each launch has imported when it has trained, and torchrun. Nothing else may stand here: a record
#: tells of the sources of all that its rank imported.
EVERY_RANK = (
    "torch",
    "torch.distributed.run",
    "transformers",
    "pytest_llmperf.worker.__main__",
    "pytest_llmperf.worker.rank_job",
    "pytest_llmperf.worker.recipes.huggingface",
)

_INSTALLED = frozenset({"site-packages", "dist-packages"})


def import_needs(needs: Sequence[str]) -> None:
    """Import what ``needs`` name: ``family:llama``, ``liger``, …; what is not there is the rank's to tell."""
    for need in needs:
        kind, _, name = need.partition(":")
        with suppress(ImportError):
            _IMPORTS[kind](name)


def _family(model_type: str) -> None:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: PLC0415 - torch's import is watched

    if model_type in CONFIG_MAPPING:
        with suppress(KeyError):  # no causal language model
            _ = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]


def _liger(_: str) -> None:
    importlib.import_module("transformers.integrations.liger")
    # By name, as the Trainer does: the package imports its parts when they are asked for.
    _ = importlib.import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance  # noqa: SLF001


_IMPORTS: Mapping[str, Callable[[str], object]] = {
    "family": _family,
    "liger": _liger,
    "flash_attention_2": lambda _: importlib.import_module("flash_attn.flash_attn_interface"),
    "fp8": lambda _: importlib.import_module("torchao.float8"),
    "text": lambda _: importlib.import_module("datasets"),
}


def sources() -> dict[str, int]:
    """When every imported file that is installed nowhere was changed last, in nanoseconds, and the folders of what is
    installed, which change with the packages in them."""
    own = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib"))
    files = {str(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    wanted = {path for path in sys.path if Path(path).name in _INSTALLED}
    for file in files:
        if _INSTALLED.isdisjoint(Path(file).parts) and not os.path.realpath(file).startswith(own):
            wanted.add(file)
    found = {}
    for path in sorted(wanted):
        with suppress(OSError):
            found[path] = Path(path).stat().st_mtime_ns
    return found
