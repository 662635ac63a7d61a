"""Imports: what every rank and each need imports, which distributions were, and what is not as it was installed."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import site
import sys
import sysconfig
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

# Of a digest: enough to tell two files apart, and short enough for a line.
DIGITS = 12

# Looked at whatever their size and date say: what a step runs most of.
_OF_A_STEP = re.compile(r"torch/(nn/(functional|modules/\w+|parallel/distributed)|optim/\w+|autograd/\w+|_tensor)\.py")


def short_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def loaded() -> dict[str, str]:
    """Each imported distribution with its version, and each ``.pth`` file whose lines Python ran, by their digest."""
    found: dict[str, str] = {}
    with suppress(Exception):  # a broken distribution is not worth a launch
        found = {re.sub(r"[-_.]+", "-", name).lower(): each for name, each, _ in _distributions_of(list(sys.modules))}
    # A folder that is only on the path has its own read by nobody.
    own = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    for folder in map(Path, () if sys.flags.no_site else [*site.getsitepackages(), *own]):
        for path in sorted(folder.glob("*.pth")):
            with suppress(OSError):
                lines = [line for line in path.read_bytes().splitlines() if line.startswith((b"import ", b"import\t"))]
                if lines:
                    found[path.name] = short_digest(b"\n".join(lines))
    return found


# Files that were looked at, and what of them is patched: a fork goes on with its server's.
LOOKED_AT, _PATCHED = set[str](), dict[str, str]()


def patched_files() -> dict[str, str]:
    """Imported Python files that differ from what their distribution's RECORD lists, by their digest."""
    files = {name: str(getattr(module, "__file__", None)) for name, module in list(sys.modules.items())}
    new = {name: file for name, file in files.items() if file not in LOOKED_AT}
    with suppress(Exception):
        for _, _, distribution in _distributions_of(new):
            _PATCHED.update(_patched(distribution, {*new.values()}))
    LOOKED_AT.update(new.values())
    return dict(sorted(_PATCHED.items()))


def _patched(distribution: metadata.Distribution, files: set[str]) -> Iterator[tuple[str, str]]:
    root = str(distribution.locate_file("")).rstrip("/")
    own = getattr(distribution, "_path", None)  # the folder of its metadata
    installed_at = (own / "RECORD").stat().st_mtime if own is not None and (own / "RECORD").exists() else 0.0
    recorded = _recorded(distribution)
    for name in {file.removeprefix(f"{root}/") for file in files} & recorded.keys():
        digest, _, size = recorded[name].partition(",")
        with suppress(OSError, ValueError):
            about = os.stat(path := f"{root}/{name}")  # noqa: PTH116 - of thousands of files
            # pip writes RECORD last: what was written after it, or has another size, is looked into.
            if about.st_size == int(size) and about.st_mtime <= installed_at + 1 and not _OF_A_STEP.fullmatch(name):
                continue
            content = Path(path).read_bytes()
            if urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode() != digest:
                yield name, short_digest(content)


@cache
def _recorded(distribution: metadata.Distribution) -> Mapping[str, str]:
    """What RECORD says of each Python file; read once for all forks of a process, as it has ten thousand lines."""
    lines = (line.partition(",sha256=") for line in (distribution.read_text("RECORD") or "").splitlines())
    return {name: rest for name, _, rest in lines if name.endswith(".py")}


# Its name, its version and itself.
_Named: TypeAlias = tuple[str, str, metadata.Distribution]


@cache
def known() -> tuple[Mapping[str, list[str]], Mapping[str, _Named]]:
    """The names of the distributions that have each package, and those by name; once for all forks of a process."""
    first = reversed(list(metadata.distributions()))  # the first on the path counts
    named = ((about["Name"], about["Version"], each) for each in first if (about := each.metadata)["Name"])
    return metadata.packages_distributions(), {each[0]: each for each in named}


def _distributions_of(modules: Iterable[str]) -> tuple[_Named, ...]:
    packages, distributions = known()
    tops = {name.partition(".")[0] for name in modules}
    # An installation that was broken off has files and no name; it hides no other.
    names = sorted({name for top in tops for name in packages.get(top, ()) if name in distributions})
    return tuple(distributions[name] for name in names)


#: What each rank has imported when it has trained, and torchrun. Nothing else: a record tells of all that was imported.
EVERY_RANK = (
    *"torch torch.distributed.run transformers pytest_llmperf.worker.__main__ pytest_llmperf.worker.rank_job".split(),
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
    "nf4": lambda _: importlib.import_module("bitsandbytes.nn"),
    "text": lambda _: importlib.import_module("pyarrow.parquet"),
}


def sources() -> dict[str, int]:
    """When each imported file that is installed nowhere was changed last, in ns, and the installed ones' folders."""
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
