"""Arguments: what transformers' Trainer and a model's configuration are given beside what has a field of its own."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pytest_llmperf.settings.setting import Evidence, Setting, SpecError, TrainSpec, claimed, equal, is_refusal
from pytest_llmperf.support.files import hashed, shipped
from pytest_llmperf.support.user_input import hint

__tracebackhide__ = is_refusal
#: The fields that hold a mapping, kept as JSON text that equal mappings share; with an example of each.
MAPPINGS = {
    "training_arguments": "{'adam_beta2': 0.95}",
    "model_kwargs": "{'num_hidden_layers': 8}",
    "hub_kernels": "{'RMSNorm': 'kernels/rmsnorm:LlamaRMSNorm'}",
}
#: Those that say what somebody else names.
OPEN = ("training_arguments", "model_kwargs")

# Whose names are fields here, as patterns; by the word "itself" those that a measured training sets.
_OWNED = shipped(__file__, "owned.ini")

# What JSON has for the types that an annotation may name; of others nothing is asked.
_JSON: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "None": (type(None),),
    "dict": (dict,),
    "dict[str, Any]": (dict,),
    "list[str]": (list,),
}
_READABLE = re.compile(r"[\w.+-]{1,60}", re.ASCII)


def canonical(name: str, value: Any) -> Any:
    """``value`` of such a field as its JSON text, empty where it says nothing; what is neither mapping nor text as it
    is. SpecError: JSON has no such value, or the text is no object."""
    if not isinstance(value, (str, Mapping)):
        return value
    try:
        read = json.loads(value or "{}") if isinstance(value, str) else dict(value)
        text = json.dumps(read, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SpecError(f"TrainSpec: {name}={value!r}: expected names with values as JSON has them ({error})") from None
    if not isinstance(read, dict):
        raise SpecError(f"TrainSpec: {name}={value!r}: expected names with their values, e.g. {MAPPINGS[name]}")
    return text if read else ""


def values(spec: TrainSpec, name: str) -> dict[str, Any]:
    """What the field ``name`` says, by name."""
    return dict(json.loads(getattr(spec, name) or "{}"))


@cache
def known_arguments() -> Mapping[str, str]:
    """The fields of the installed TrainingArguments with their types as written; none where it is not installed."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return {}
    tree = ast.parse(Path(found.origin).with_name("training_args.py").read_text(encoding="utf-8"))
    bodies = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments")
    fields = (node for node in next(bodies, []) if isinstance(node, ast.AnnAssign))
    return {ast.unparse(node.target): ast.unparse(node.annotation) for node in fields}


def _problems(spec: TrainSpec) -> Iterator[str]:
    for field in OPEN:
        known = known_arguments() if field == "training_arguments" and values(spec, field) else {}
        for name, value in values(spec, field).items():
            owner = next((own for own, names in _OWNED[field].items() if re.fullmatch(names, name)), None)
            types = [part.strip() for part in known.get(name, "Any").split("|")]
            if owner == "itself":
                yield f"TrainSpec: {field} says {name}, which a measured training decides by itself: leave it out"
            elif owner:
                yield f"TrainSpec: {field} says {name}, which has a field of its own: use {owner}"
            elif known and name not in known:
                yield f"TrainSpec: {field} says {name}, which is no field of TrainingArguments{hint(name, known)}"
            elif {*types} <= {*_JSON} and type(value) not in {kind for each in types for kind in _JSON[each]}:
                yield f"TrainSpec: {field} says {name}={value!r}, expected {known[name]}"


def _word(field: str, prefix: str, spec: TrainSpec) -> str:
    """All of it where that is short, else digits that tell it from others."""
    pairs = values(spec, field).items()
    words = "-".join(f"{name}-{value if isinstance(value, str) else json.dumps(value)}" for name, value in pairs)
    return f"{prefix}-{words if _READABLE.fullmatch(words) else hashed(words)[:8]}" if words else ""


@dataclass(frozen=True)
class ArgumentsEvidence:
    """What the Trainer's arguments and the model's configuration held of all that was given; empty: nothing was."""

    training_arguments: Mapping[str, Any] | None = None
    model_kwargs: Mapping[str, Any] | None = None


def _held(field: str, spec: TrainSpec, evidence: Evidence) -> str | None:
    asked, seen = values(spec, field), getattr(evidence.arguments, field)
    seen = claimed(seen, field) if asked else seen or {}
    for name in sorted({*asked, *seen}):
        if name not in asked:
            return f"{field} did not say {name}, the run had {seen[name]!r}"
        if not _agrees(asked[name], seen.get(name)):
            return equal(f"{field} {name}", asked[name], seen.get(name))
    return None


def _agrees(asked: Any, seen: Any) -> bool:
    """Of a mapping, as far as it says anything."""
    if isinstance(asked, Mapping) and isinstance(seen, Mapping):
        return all(_agrees(value, seen.get(name)) for name, value in asked.items())
    return bool(asked == seen)


SETTING = Setting(
    name="arguments",
    fields=OPEN,
    in_id={"training_arguments": partial(_word, OPEN[0], "args"), "model_kwargs": partial(_word, OPEN[1], "config")},
    problems=_problems,
    evidence=ArgumentsEvidence,
    checks={field: partial(_held, field) for field in OPEN},
)
