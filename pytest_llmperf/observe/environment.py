"""Where this rank runs: hardware, driver, versions, and the environment variables that change speed."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote

import torch

from pytest_llmperf.observe import device as gpu
from pytest_llmperf.records.launch import Environment, Place
from pytest_llmperf.support.files import boot_id

_PACKAGES = (
    "torch transformers accelerate triton liger-kernel flash-attn bitsandbytes torchao numpy nvidia-cudnn-cu13".split()
)

# A checkout of millions of lines on a slow file system is not worth more of a GPU's time.
_GIT_SECONDS = 2.0

_VARIABLE_PREFIXES = (
    *("CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "NVSHMEM_", "GLOO_", "OMP_", "MKL_", "KMP_", "LLMPERF_INJECT"),
    # Where packages come from, and with them all that is imported.
    *("LD_PRELOAD", "MALLOC_", "GLIBC_TUNABLES", "TORCHDYNAMO_", "USE_HUB_KERNELS"),
    *("ATEN_", "ONEDNN_", "DNNL_"),
    *("PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_", "LIGER_", "FLASH_ATTENTION_", "ACCELERATE_", "NVIDIA_TF32"),
)
# The interpreter's own; images name theirs PYTHON_VERSION and the like.
_OF_PYTHON = re.compile(r"PYTHON([A-Z]|_(GIL|JIT|PERF|CPU))")
# Set afresh by every launch, or naming things that differ between machines without changing the work.
_NOT_CAUSES = frozenset(
    {"CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    | {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_HOME"}
    | {"TRITON_PTXAS_PATH"}  # inductor sets it where it compiles
    | {"KMP_DUPLICATE_LIB_OK"}  # threadpoolctl sets it, for whoever imports that, and no library runs otherwise for it
    | {"PYTHONUNBUFFERED", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONHOME"}
    | {"PYTHONNOUSERSITE", "PYTHONUSERBASE", "PYTHONSTARTUP", "PYTHONPYCACHEPREFIX", "PYTHONSAFEPATH"}
    | {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_TRACE_BUFFER_SIZE"}
)


def environment(device: torch.device) -> Environment:
    return Environment(
        gpu=device_name(device),
        driver=gpu.driver() if gpu.is_gpu(device) else "",
        versions=_versions(),
        variables=_variables(os.environ),
        platform=f"{platform.system()} {platform.machine()}",
    )


def place_of(device: torch.device) -> Place:
    """Where this rank runs, as its record has it."""
    name = device_name(device)
    if gpu.is_gpu(device):
        name = f"{name} {gpu.gpu_uuid(device)}"
    return Place(platform.node(), name, boot_id()[:8])  # where that is empty the host's name has to do


def device_name(device: torch.device) -> str:
    """``NVIDIA H200``, or the CPU's model name."""
    if gpu.is_gpu(device):
        return gpu.gpu_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = _version(metadata.distribution(package))
    # With its build, e.g. 2.11.0+cu130, which the distribution may not say.
    versions["torch"] = " ".join([torch.__version__, *versions.get("torch", "").split()[1:]])
    return versions | gpu.versions()


def _version(distribution: metadata.Distribution) -> str:
    """Its version, and where it was not installed from an index the commit: ``5.24.0.dev0 @1a2b3c4d5e6f``.

    Source: direct_url.json of the packaging specifications (PEP 610).
    """
    about = json.loads(distribution.read_text("direct_url.json") or "{}")
    commit = about.get("vcs_info", {}).get("commit_id", "")
    if about.get("dir_info", {}).get("editable"):
        # The one that is checked out, marked where files differ from it; empty: nobody knows.
        folder = unquote(about["url"].removeprefix("file://"))
        command = ["git", "-C", folder, "describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*"]
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
            commit = done.stdout.strip()
    return f"{distribution.version} @{commit[:12]}" if commit else distribution.version


_PACKAGE = Path(__file__).resolve().parents[1]


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    found = {
        name: value
        for name, value in sorted(environment.items())
        if (name.startswith(_VARIABLE_PREFIXES) or _OF_PYTHON.match(name)) and name not in _NOT_CAUSES
    }
    if "PYTHONPATH" in found:
        # The launcher puts this package's own there, so that any interpreter finds it: none of the user's.
        paths = found["PYTHONPATH"].split(os.pathsep)
        users = [path for path in paths if not (Path(path) / _PACKAGE.name).resolve().is_relative_to(_PACKAGE)]
        found["PYTHONPATH"] = os.pathsep.join(users)
    return {name: value for name, value in found.items() if value}
