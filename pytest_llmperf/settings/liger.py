"""Kernels in the place of a model's own: Liger's, all of them or a choice; and hub repositories', out of folders."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pytest_llmperf.settings.arguments import values
from pytest_llmperf.settings.models import slugged
from pytest_llmperf.settings.setting import Axis, Evidence, Package, Search, Setting, TrainSpec, at_default, claimed
from pytest_llmperf.support.files import hashed, shipped, text_of
from pytest_llmperf.support.user_input import from_here

#: What Liger's patches can be told to replace, by its own words.
LIGER_KERNELS = tuple("rope rms_norm layer_norm swiglu geglu cross_entropy fused_linear_cross_entropy".split())

_KNOWN = shipped(__file__, "marks.ini")
#: Of the two losses that Liger has, the one that saves the most memory.
LOSS = "fused_linear_cross_entropy"


@cache
def _installed() -> Mapping[str, Collection[str]]:
    """By family what the installed Liger replaces by itself, as its source says; empty where none is installed."""
    found = find_spec("liger_kernel")
    source = text_of(Path(str(found.origin)).with_name("transformers") / "monkey_patch.py") if found else ""
    heads = re.findall(r"^def (\w+)\((.*?)\)", source, re.DOTALL | re.MULTILINE)
    given = {name: re.findall(r"\b(\w+): bool = True", head) for name, head in heads}
    table = source.partition("\nMODEL_TYPE_TO_APPLY_LIGER_FN = {")[2].partition("}")[0]
    return {family: given.get(name, ()) for family, name in re.findall(r'"(\w+)": (\w+)', table)}


def lacks_kernels(spec: TrainSpec) -> bool:
    """Whether the installed Liger is known to have none for its family."""
    return bool(_installed()) and spec.architecture.config["model_type"] not in _installed()


def liger_kernels(spec: TrainSpec) -> tuple[str, ...]:
    """Those that ``liger_kernels="all"`` stands for, in Liger's order; none where that is not known of the family."""
    family = spec.architecture.config["model_type"]
    gate = next((name for name, families in _KNOWN["gates"].items() if family in families.split()), "")
    chosen = _installed().get(family, ()) if _installed() else {"rope", "rms_norm", gate, LOSS} if gate else ()
    return tuple(kernel for kernel in LIGER_KERNELS if kernel in chosen)


def _clash(spec: TrainSpec) -> str | None:
    if spec.liger_kernels == "all":
        return None
    words = spec.liger_kernels.split("+")
    if unknown := [word for word in words if word not in LIGER_KERNELS]:
        return f"unknown Liger kernel {unknown[0]!r}; known: {', '.join(LIGER_KERNELS)}, joined by '+'"
    ordered = "+".join(name for name in LIGER_KERNELS if name in words)
    if ordered != spec.liger_kernels:
        return f"liger_kernels={spec.liger_kernels!r} must name each kernel once, in Liger's order: {ordered!r}"
    if "cross_entropy" in words and LOSS in words:
        return "Liger's cross_entropy and fused_linear_cross_entropy replace the same; name one of them"
    return None


def _axis(base: TrainSpec, search: Search) -> Axis | None:
    """Off, all of them, all but each one, and the loss alone, which saves the most memory."""
    if search.on_cpu or lacks_kernels(base):
        return None
    kernels = liger_kernels(base)
    without = {f"without {one}": "+".join(each for each in kernels if each != one) for one in kernels if kernels[1:]}
    chosen = {"all": "all"} | without | ({f"{LOSS} alone": LOSS} if LOSS in kernels else {})
    on = {name: {"liger": True, "liger_kernels": each} for name, each in chosen.items()}
    return Axis.of("liger", {"off": {"liger": False, "liger_kernels": "all"}, **on})


_LIGER = Package("liger_kernel", "Liger", "'pytest-llmperf[liger]'", preload="liger")


@dataclass(frozen=True)
class LigerEvidence:
    liger_modules: int | None = None
    """Modules whose forward pass is one of Liger's."""
    liger_forwards: Sequence[str] | None = None
    """The names of those forward passes, each once."""
    liger_functions: Sequence[str] | None = None
    """Functions that it replaced, which no module shows; old records do not tell."""
    liger_note: str = ""
    """What Liger said when it patched nothing."""


def _liger(spec: TrainSpec, evidence: Evidence) -> str | None:
    seen = evidence.liger
    patched = claimed(seen.liger_modules, "liger_modules") + len(seen.liger_functions or ())
    if spec.liger and not patched:
        return "asked for liger, nothing was patched" + (f" ({seen.liger_note})" if seen.liger_note else "")
    if patched and not spec.liger:
        return f"liger was not asked for, and {patched} modules were patched"
    if spec.liger_kernels == "all":
        return None
    forwards = " ".join(claimed(seen.liger_forwards, "liger_forwards")).lower()
    functions = claimed(seen.liger_functions, "liger_functions")
    ran = {kernel for mark, kernel in _KNOWN["kernels"].items() if mark in forwards} | {*functions}
    if ran == {*spec.liger_kernels.split("+")}:
        return None
    told = "+".join(name for name in LIGER_KERNELS if name in ran)
    return f"asked for the Liger kernels {spec.liger_kernels}, the run had {told or 'none'}"


SETTING = Setting(
    name="liger",
    fields=("liger", "liger_kernels"),
    in_id={"liger": "liger", "liger_kernels": "{}"},
    switch="liger",
    switched=("liger_kernels",),
    clash=_clash,
    why_not_on_cpu=lambda spec: "Liger's Triton kernels need a GPU" if spec.liger else None,
    needs=lambda spec: _LIGER if spec.liger else None,
    plain=at_default("liger", "liger_kernels"),
    axis=_axis,
    evidence=LigerEvidence,
    checks={"liger": _liger},
)


# Hub kernels: as the Hugging Face library ``kernels`` has them. A repository has a build of its layers for each kind of
# system, a folder with a ``metadata.json``.

_WORDS = re.compile(r"(?P<folder>.+?)(@(?P<revision>[0-9a-f]{7,64}))?:(?P<layer>\w+)")
_BUILDS = ("build/*/metadata.json", "*/metadata.json", "metadata.json")
_LONGEST_WORD = 60
_KERNELS = Package("kernels", "kernels", "kernels")


@dataclass(frozen=True)
class HubKernel:
    """A layer of a repository that lies in a folder."""

    folder: Path
    name: str
    """The repository's, as its builds have it: the same wherever the folder is."""
    revision: str
    """How the repository's must begin; empty: nothing is asked of it."""
    layer: str

    @classmethod
    def of(cls, words: Any) -> HubKernel:
        """By ``FOLDER:LAYER`` or ``FOLDER@REVISION:LAYER``; a ``ValueError`` of one line where there is none."""
        if (found := _WORDS.fullmatch(str(words))) is None:
            raise ValueError(f"{words!r} names no kernel, expected 'FOLDER:LAYER' or 'FOLDER@REVISION:LAYER'")
        folder = Path(found["folder"]).expanduser()
        if name := _name(folder.absolute()):
            return cls(folder, name, found["revision"] or "", found["layer"])
        why = "holds no build that says its name (build/…/metadata.json)" if folder.is_dir() else "is no folder"
        raise ValueError(f"{found['folder']!r} {why}{from_here(folder)}, expected a kernel repository's")

    def __str__(self) -> str:
        return f"{self.name}{self.revision and '@'}{self.revision}:{self.layer}"


@lru_cache(maxsize=256)
def _name(folder: Path) -> str:
    for build in (path for pattern in _BUILDS for path in sorted(folder.glob(pattern))):
        with suppress(ValueError, KeyError, TypeError):
            return str(json.loads(text_of(build))["name"])
    return ""


def hub_kernels(spec: TrainSpec) -> dict[str, HubKernel]:
    """By the layers whose place they take."""
    return {name: HubKernel.of(words) for name, words in values(spec, "hub_kernels").items()}


def _problems(spec: TrainSpec) -> Iterator[str]:
    for name, words in values(spec, "hub_kernels").items():
        try:
            HubKernel.of(words)
        except (ValueError, OSError, RuntimeError) as error:  # too long a name, ~ of no user
            yield f"TrainSpec: hub_kernels: {name}: {error}"


def _word(spec: TrainSpec) -> str:
    asked = hub_kernels(spec)
    words = "-".join(sorted({slugged(str(kernel), "") for kernel in asked.values()}))
    if len(asked) > 1 or any(name != kernel.layer for name, kernel in asked.items()):  # which layers, no word tells
        words += "-" + hashed(" ".join(sorted(f"{name}={kernel}" for name, kernel in asked.items())))[:8]
    return words and f"hub-{words if len(words) <= _LONGEST_WORD else hashed(words)[:8]}"


def _replaced_twice(spec: TrainSpec) -> str | None:
    """Liger patches last: a hub kernel of what it replaces would not run."""
    if not spec.liger or not spec.hub_kernels:
        return None
    layers = " ".join(hub_kernels(spec))
    of_liger = liger_kernels(spec) if spec.liger_kernels == "all" else spec.liger_kernels.split("+")
    twice = [each for each in of_liger if _KNOWN["layers"].get(each, each) in layers]
    left = "+".join(each for each in of_liger if each not in twice)
    instead = f"liger_kernels={left!r}" if left else "liger=False"
    return f"Liger's {'+'.join(twice)} would replace layers of hub_kernels again; use {instead}" if twice else None


@dataclass(frozen=True)
class HubKernelsEvidence:
    hub_kernels: Mapping[str, Any] | None = None
    """By layer: of which ``repository`` and ``revision`` a ``layer`` computes it, in how many ``modules``, and how many
    are ``left`` to themselves."""


def _active(spec: TrainSpec, evidence: Evidence) -> str | None:
    asked, seen = hub_kernels(spec), evidence.hub_kernels.hub_kernels
    seen = claimed(seen, "hub_kernels") if asked else seen or {}
    for name in sorted({*asked, *seen}):
        kernel, had = asked.get(name), seen.get(name) or {"modules": 0, "left": 0}
        if kernel is None:
            return f"hub_kernels did not ask for {name}, and {had['repository']}'s {had['layer']} ran in its place"
        if not had["modules"] or had["left"]:
            of = had["modules"] + had["left"]
            return f"asked for {name} by the hub kernel {kernel}, {had['modules']} of its {of} modules ran that"
        if (kernel.name, kernel.layer) != (had["kernel"], had["layer"]):
            return f"asked for {name} by the hub kernel {kernel}, the run had {had['kernel']}:{had['layer']}"
        if kernel.revision and not re.fullmatch(f"{kernel.revision}[0-9a-f]*", had["revision"]):
            return f"asked for {name} by the hub kernel {kernel}, the folder's revision was {had['revision']}"
    return None


HUB = Setting(
    name="hub_kernels",
    fields=("hub_kernels",),
    in_id={"hub_kernels": _word},
    problems=_problems,
    clash=_replaced_twice,
    needs=lambda spec: _KERNELS if spec.hub_kernels else None,
    plain=at_default("hub_kernels"),
    evidence=HubKernelsEvidence,
    checks={"hub_kernels": _active},
)
