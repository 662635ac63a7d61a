"""Changes: what of a training is exact, and is another than in its baseline. Pure.

Evidence and first losses have no noise: one launch tells, and what it tells is said in every verdict, also in a
``pass``. How often either was seen to differ where nothing had changed: docs/explanation/verdicts/exact.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pytest_llmperf.judge.evidence.first_losses import changed_losses
from pytest_llmperf.records.launch import PLACEMENT, Launch
from pytest_llmperf.support.json_fields import flat

# Told by itself: a fault that was asked for, what ranks saw differently from one another, how losses compare. And
# circumstances, which are no property of the training: where a scheduler placed the ranks, how they were started, and
# why they ended. A checkpoint has a figure for its size, of which a few bytes say in which step it was written. Epochs
# follow from the number of steps.
_TOLD_ELSEWHERE = frozenset(
    {"injected", "other_ranks", "setup.samples", *PLACEMENT, "start", "ended", "allocator_retries", "checkpoint_bytes"}
    | {"epochs", "found", "remarks"}
)

# What one launch could not see is no change.
_UNKNOWN = "unknown"

# Other than None, which a configuration may well say.
_ABSENT = "none"

# A file keeps six digits.
_ROUNDED = 1e-5

# A line is read at a glance; the record has all of it.
_WIDTH = 80


def changes(launches: Sequence[Launch], reference: Sequence[Launch]) -> tuple[str, ...]:
    """What some of ``launches`` had and none of ``reference``, ``name: then -> now``, each once; their losses first.

    ``reference`` are launches of a baseline, the newest last; nothing has changed where there are none.
    """
    return (*changed_losses(launches, reference), *changed_evidence(launches, reference))


def changed_evidence(launches: Sequence[Launch], reference: Sequence[Launch]) -> tuple[str, ...]:
    """The same without the losses, which two trainings that are meant to differ do not share."""
    if not reference:
        return ()
    lines = (line for launch in launches for line in (*_evidence(launch, reference), *_commits(launch, reference)))
    return tuple(sorted(dict.fromkeys(lines), key=lambda line: not line.startswith(_WORST)))


# What changes most is told first, where not all can be shown.
_WORST = ("attention", "functions", "dropout", "loss_function", "liger", "config")


def lost_attention_kernel(launches: Sequence[Launch], reference: Sequence[Launch]) -> Iterator[str]:
    """A line where the fused attention that ``reference`` ran is gone.

    On a GPU a launch's own evidence is enough to call that invalid; a CPU need not have one, unless its baseline had.
    """
    had = next((kernel for launch in reversed(reference) if _is_fused(kernel := _kernel(launch))), None)
    for launch in launches:
        now = _kernel(launch)
        if had and launch.evidence.get("attention") == "sdpa" and now != _UNKNOWN and not _is_fused(now):
            yield (
                f"asked for attention sdpa, its fused kernel was lost: {had} -> {now or 'plain matrix products'} "
                "(if that is meant, remove the baseline and record it anew)"
            )
            return


def _kernel(launch: Launch) -> str:
    return str(launch.evidence.get("attention_kernel", _UNKNOWN))


def _is_fused(kernel: str) -> bool:
    return "attention" in kernel and "attention_math" not in kernel


def _evidence(launch: Launch, reference: Sequence[Launch]) -> Iterator[str]:
    known = [(each, _topics(each.evidence)) for each in reference]
    for topic, facts in _topics(launch.evidence).items():
        # What old records do not tell of is not compared.
        told = [(each, theirs[topic]) for each, theirs in known if topic in theirs]
        if not told or topic in _TOLD_ELSEWHERE:
            continue
        newest, then = told[-1]
        for name in sorted({*facts, *then}):
            value, seen = facts.get(name, _ABSENT), [theirs.get(name, _ABSENT) for _, theirs in told]
            same = _same_dropout if topic == "setup.dropout" else _same
            if _UNKNOWN in (value, seen[-1]) or any(same(value, each) for each in seen):
                continue
            came_or_went = _ABSENT in (value, seen[-1])
            upgraded = partial(_upgraded, launch, newest)
            if topic == "setup.functions":
                # No upgrade of the stack explains that a kernel package is gone.
                is_explained = {value, seen[-1]} <= _OF_THE_STACK | {"false"} and any(map(upgraded, _STACK))
            else:
                is_explained = _is_explained(topic, name, value, came_or_went, upgraded)
            if not is_explained:
                yield f"{_label(topic, name)}: {_shown(seen[-1])} -> {_shown(value)}"


def _topics(evidence: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The facts of each kind of evidence; of its setup each kind by itself. A plain value is the one fact ``""``."""
    setup = evidence.get("setup", {})
    kinds = {name: value for name, value in evidence.items() if name != "setup"}
    kinds |= {f"setup.{name}": value for name, value in setup.items()}
    return {name: dict(flat(value)) for name, value in kinds.items()}


def _label(topic: str, name: str) -> str:
    return f"{topic.removeprefix('setup.')} {name}".strip()


# The distribution that a module is of, by the first word of its name; other modules are the user's own.
_DISTRIBUTIONS = {
    name: name.replace("_", "-")
    for name in "transformers accelerate liger_kernel flash_attn bitsandbytes torchao".split()
}


def _is_explained(topic: str, name: str, value: Any, came_or_went: bool, upgraded: Callable[[str], bool]) -> bool:
    """Whether another version, which is told by itself, brings another file, or a key of the configuration."""
    if topic == "setup.sources":
        package = _DISTRIBUTIONS.get(name.partition(".")[0])
        # Which modules of a package there are follows from the model's classes, which are told.
        return package is not None and (came_or_went or upgraded(package))
    if topic == "setup.step":  # decorators of the packages' own come and go
        known = {module.partition(".")[0] for module in str(value).split(" > ")} <= _OF_THE_STACK
        return known and any(map(upgraded, _STACK))
    if topic in _OWNERS:
        return came_or_went and upgraded(_OWNERS[topic])
    return False


_STACK = ("torch", "transformers", "accelerate")
_OF_THE_STACK = frozenset(
    {"torch", "transformers", "accelerate", "liger_kernel", "contextlib", "functools", "built in", "none"}
)

# Whose fields a setup's topic lists.
_OWNERS = {"setup.config": "transformers", "setup.torch": "torch", "setup.optimizer": "torch"}


def _commits(launch: Launch, reference: Sequence[Launch]) -> Iterator[str]:
    """Packages that are of the same version and another commit."""
    for name, now in sorted(launch.environment.versions.items()):
        seen = [each.environment.versions.get(name, "") for each in reference]
        if now not in seen and not _upgraded(launch, reference[-1], name):
            yield f"{name}: {seen[-1]} -> {now}"


def _upgraded(a: Launch, b: Launch, package: str) -> bool:
    return _release(a, package) != _release(b, package)


def _release(launch: Launch, package: str) -> str:
    """Its version without the commit that it was built from."""
    return launch.environment.versions.get(package, "").partition(" ")[0]


# What is ours has the name of its class, wherever that moves.
_OURS = re.compile(r"\bpytest_llmperf(?:\.\w+)*\.(?=\w)")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, str) and isinstance(b, str):
        return _OURS.sub("", a) == _OURS.sub("", b)
    # JSON has no tuples.
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, (int, float)):
        return abs(a - b) <= _ROUNDED * abs(a)
    return bool(a == b)


_HOW_OFTEN = re.compile(r" x\d+")


def _same_dropout(a: Any, b: Any) -> bool:
    """Older records tell a probability, and not how many modules have it."""
    if _HOW_OFTEN.search(str(a)) and _HOW_OFTEN.search(str(b)):
        return _same(a, b)
    return _HOW_OFTEN.sub("", str(a)) == _HOW_OFTEN.sub("", str(b))


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        value = " ".join(map(str, value))
    text = "none" if value is None or value == "" else str(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
