"""Exact counts: what a step does, held against the baseline's without tolerance, by one launch: of one spec and
versions all run the same kernels as often on every host of a machine kind (docs/explanation/traces.md). What costs time
and is easily written by mistake (a wait, a copy) is ``regressed``, all else ``changed`` (decision 29). Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pytest_llmperf.judge.repeats import Launches, Repeats, changed_losses, named
from pytest_llmperf.records.launch import OLDER, PLACEMENT, Launch
from pytest_llmperf.records.metrics import METRICS, counts
from pytest_llmperf.records.result import Check, Verdict, counts_of, is_choice
from pytest_llmperf.records.trace import COUNTED, COUNTLESS, UNWANTED, WORK, Trace, new_places
from pytest_llmperf.settings.compilation import is_autotuned
from pytest_llmperf.support import codec
from pytest_llmperf.support.files import hashed
from pytest_llmperf.support.formats import first_n


@dataclass(frozen=True, kw_only=True)
class StoredTrace:
    """Of the launch that was accepted last and had one."""

    trace: Trace
    versions: Mapping[str, str]
    counts: Mapping[str, float]
    """Of what is counted elsewhere than in the trace: graph breaks, recompilations, the allocator's retries."""

    @classmethod
    def of(cls, launches: Sequence[Launch]) -> StoredTrace | None:
        """Of the newest of ``launches`` that has a trace."""
        for launch in reversed(launches):
            if launch.trace:
                return cls(trace=launch.trace, versions=launch.environment.versions, counts=other_counts(launch))
        return None

    def other_versions(self, launch: Launch) -> tuple[str, ...]:
        """What differs in the versions of ``launch``, ``name: then -> now``; its counts are news then, and no gate."""
        mine, theirs = self.versions, launch.environment.versions
        # Of a package that only one of the two knows nothing is known; without torch's version no count is exact.
        compared = sorted(({*mine} & {*theirs} - COUNTLESS) | {"torch"})
        told = [(name, mine.get(name, "unknown"), theirs.get(name, "unknown")) for name in compared]
        return tuple(f"{name}: {then} -> {now}" for name, then, now in told if then != now or then == "unknown")

    def to_plain(self) -> dict[str, Any]:
        """With a sum over what is exact in it: nobody edits a count by hand unseen."""
        values = codec.plain_fields(self)
        return {**values.pop("trace"), **values, "sum": _sum(self)}

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> StoredTrace:
        own = {name: value for name, value in values.items() if name in ("versions", "counts")}
        trace = {name: value for name, value in values.items() if name not in ("versions", "counts", "sum")}
        stored = codec.read_fields(cls, {**own, "trace": codec.read(Trace, trace)}, "its trace")
        if values.get("sum") != _sum(stored):
            raise ValueError("its trace was edited: its counts do not have the sum that was written with them")
        return stored


def other_counts(launch: Launch) -> dict[str, float]:
    """What a launch counted by other means than its trace."""
    # Of what is not compiled, nothing breaks.
    found = ((name, launch.evidence.get(row.evidence)) for name, row in counts().items() if row.evidence)
    return {name: float(count) for name, count in found if isinstance(count, int) and not isinstance(count, bool)}


def _sum(stored: StoredTrace) -> str:
    counts = sorted((kind, name, f"{count:.6g}") for (kind, name), count in stored.trace.counts.items())
    others = sorted((name, f"{count:.6g}") for name, count in stored.counts.items())
    return hashed(json.dumps([counts, others, sorted(stored.versions.items())]))


_MOST_NAMES, _NAME_WIDTH = 3, 60


def count_checks(launches: Launches, stored: StoredTrace | None, repeats: Repeats | None = None) -> tuple[Check, ...]:
    """A check for each count of the launches; without a verdict where nothing gates it. ``repeats``: of a script."""
    newest = StoredTrace.of(launches)
    if not launches or (newest is None and stored is None):
        return ()
    gate = stored if stored and not stored.other_versions(launches[-1]) and not _is_tuned(launches[-1]) else None
    found = []
    for name, metric in counts().items():
        # What is counted without a trace gates launches that could not be traced as well.
        told = [count for launch in launches if (count := count_of(launch, name)) is not None]
        if not told or (name in COUNTED and (newest is None or name not in newest.trace.metrics)):
            continue
        held = {} if gate is None else counts_of(gate.trace) if name in COUNTED else gate.counts
        baseline = held.get(name)
        if gate is None or baseline is None:
            found.append(metric.check(min(told)))
            continue
        if repeats and (ranged := repeats.count_check(name, told)):
            found.append(ranged)
            continue
        # Of launches that differ, which should not be, the mildest.
        value = min(told, key=lambda count: abs(count - baseline))
        verdict: Verdict = "pass"
        if not min(told) <= baseline <= max(told):
            verdict = "regressed" if metric.costly and min(told) > baseline else "changed"
        elif name in COUNTED and not _is_timed(launches[-1]):
            # As many as in the baseline, and no launch ran the same: another implementation.
            then = named(name, gate.trace)
            others = [named(name, launch.trace) != then for launch in launches if launch.trace]
            verdict = "changed" if all(others) else "pass"
        detail = "" if verdict == "pass" or newest is None else _named(name, newest, gate)
        found.append(metric.check(value, baseline, tolerance=0.0, limit=baseline, verdict=verdict, detail=detail))
    return tuple(found)


def trace_notes(launches: Sequence[Launch], stored: StoredTrace | None) -> tuple[str, ...]:
    """What the checks do not say: why there is no trace, that names moved, what another version does."""
    why = dict.fromkeys(launch.trace.none for launch in launches if launch.trace.none not in ("", OLDER, UNWANTED))
    notes = [f"no trace: {reason}" for reason in why]
    newest = next((launch for launch in reversed(launches) if launch.trace), None)
    if newest is None or stored is None:
        return tuple(notes)
    traces = [launch.trace.counts for launch in launches if launch.trace]
    is_script = launches[-1].is_script  # of which nobody expects that
    if any(trace != traces[0] for trace in traces) and not is_script:
        notes.append("its launches were not traced alike, though exact counts should be the same")
    then, now = stored.trace, newest.trace
    if others := stored.other_versions(newest):
        moved = [
            f"{name.removesuffix('_per_step')} {then.count(name):g} -> {now.count(name):g}"
            for name in then.metrics
            if name in now.metrics and then.count(name) != now.count(name)
        ]
        if moved:
            notes.append(f"a step has {', '.join(moved)} with other versions ({', '.join(others[:_MOST_NAMES])})")
    elif _is_timed(launches[-1]) and _work(then) != _work(now):
        gone, come = _moved(_work(then), _work(now))
        chosen = "max-autotune" if _is_tuned(launches[-1]) else "this environment"
        notes.append(f"not the same kernels, which {chosen} chose by time: {_listed(gone)} -> {_listed(come)}")
    return tuple(notes)


def _is_tuned(launch: Launch) -> bool:
    """Whether its kernels were chosen by timing them: nearly tied ones change from process to process."""
    return is_autotuned(launch.seen.compilation.torch_compile_mode)


def _is_timed(launch: Launch) -> bool:
    """The same, and where the user's environment asks for it: of the kernels' names nothing is expected."""
    variables, run = launch.environment.variables, launch.seen.run
    asks = any(variables.get(f"TORCHINDUCTOR_MAX_AUTOTUNE{which}", "0") == "1" for which in ("", "_GEMM"))
    is_compiled = bool(launch.seen.compilation.compiled_graphs)
    return _is_tuned(launch) or (asks and is_compiled) or (run.is_on_gpu and run.torch.get("cudnn_benchmark") is True)


def count_of(launch: Launch, name: str) -> float | None:
    """Of one of these metrics; ``None`` where the launch does not tell."""
    return (counts_of(launch.trace) if name in COUNTED else other_counts(launch)).get(name)


def _named(name: str, newest: StoredTrace, stored: StoredTrace) -> str:
    if name not in COUNTED or METRICS[name].unit == "bytes":
        return ""
    then, now = named(name, stored.trace), named(name, newest.trace)
    gone, come = _moved(then, now)
    more = ", ".join([_listed(come), *(new_places(name, stored.trace, newest.trace)[:_MOST_NAMES] if come else [])])
    words = [f"{word} {names}" for word, names in (("more:", come and more), ("fewer:", _listed(gone))) if names]
    ranks = newest.trace.ranks
    is_mean = any(count % 1 for each in (then, now) for count in each.values())
    return "; ".join(words) + (f"; means of {ranks} ranks, which differ" if is_mean and ranks > 1 else "")


Counts = dict[tuple[str, str], float]


def _work(trace: Trace) -> Counts:
    """Of a device: older traces tell of no exchanges."""
    return {key: count for key, count in trace.counts.items() if key[0] in WORK}


def _moved(then: Counts, now: Counts) -> tuple[list[str], list[str]]:
    apart = sorted((-abs(now.get(key, 0.0) - then.get(key, 0.0)), key[1], key) for key in {*then, *now})
    gone, come = list[str](), list[str]()
    for size, name, key in apart:
        if size:
            (come if key in now and now[key] > then.get(key, 0.0) else gone).append(f"{name} ({-size:g} a step)")
    return gone, come


def _listed(names: Sequence[str]) -> str:
    half = _NAME_WIDTH // 2
    shown = [name if len(name) <= _NAME_WIDTH else f"{name[:half]}...{name[-half:]}" for name in names]
    return first_n(shown, _MOST_NAMES)


# Changes: what of a training is exact, and is another than in its baseline.

# Told by itself: faults that were asked for, what ranks saw differently, how losses compare. Circumstances, which are
# no property of the training: where ranks were placed, how they started and ended. Epochs follow from the number of
# steps. What a user wrote anew is what is judged: it stands beside the verdict (decision 69).
_TOLD_ELSEWHERE = frozenset(
    {"injected", "other_ranks", "setup.samples", *PLACEMENT, "start", "ended", "allocator_retries"}
    | {"epochs", "found", "remarks", "skipped_steps"}
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
    ``reference`` are launches of a baseline, the newest last; nothing has changed where there are none."""
    return (*changed_losses(launches, reference), *changed_evidence(launches, reference))


def told_changes(launches: Launches, reference: Launches, repeats: Repeats | None, *more: str) -> tuple[str, ...]:
    """The same with what a script's ``repeats`` no more; of that what it was given comes first. ``more``: lines."""
    lines = [*changes(launches, reference), *more, *(repeats.changes(launches, reference) if repeats else ())]
    is_script = launches[-1].is_script
    return tuple(sorted(lines, key=lambda line: not (is_script and is_choice(line))))


def changed_evidence(launches: Sequence[Launch], reference: Sequence[Launch]) -> tuple[str, ...]:
    """The same without the losses, which two trainings that are meant to differ do not share."""
    lines = list[str]()
    for launch in launches if reference else ():
        lines += _evidence(launch, reference)
        # Packages that are of the same version and another commit.
        for name, now in sorted(launch.environment.versions.items()):
            seen = [each.environment.versions.get(name, "") for each in reference]
            if now not in seen and not _upgraded(launch, reference[-1], name):
                lines.append(f"{name}: {seen[-1]} -> {now}")
    return tuple(sorted(dict.fromkeys(lines), key=lambda line: not line.startswith(_WORST)))


# What changes most is told first, where not all can be shown.
_WORST = ("attention", "functions", "dropout", "loss_function", "liger", "config")


def _evidence(launch: Launch, reference: Sequence[Launch]) -> Iterator[str]:
    known = [(each, _topics(each.evidence)) for each in reference]
    for topic, facts in _topics(launch.evidence).items():
        # What old records do not tell of is not compared.
        told = [(each, theirs[topic]) for each, theirs in known if topic in theirs]
        if not told or topic in _TOLD_ELSEWHERE or (launch.is_script and topic == "setup.sources"):
            continue
        newest, then = told[-1]
        for name in sorted({*facts, *then}):
            value, seen = facts.get(name, _ABSENT), [theirs.get(name, _ABSENT) for _, theirs in told]
            same = _same_dropout if topic == "setup.dropout" else _same
            if _UNKNOWN in (value, seen[-1]) or any(same(value, each) for each in seen):
                continue
            if not _is_explained(topic, name, (seen[-1], value), partial(_upgraded, launch, newest)):
                yield f"{_label(topic, name)}: {_shown(seen[-1])} -> {_shown(value)}"


def _label(topic: str, name: str) -> str:
    return f"{topic.removeprefix('setup.')} {name}".strip()


def choices(launch: Launch) -> dict[str, str]:
    """What the user of a script chose, by the names that ``changes`` has for it; of our own trainings ids say it."""
    if not launch.is_script:
        return {}
    facts = (((topic, name), value) for topic, own in _topics(launch.evidence).items() for name, value in own.items())
    found = {_label(*where): _shown(value) for where, value in facts if value != _UNKNOWN}
    found |= {} if launch.step_tokens else {"tokens of each step": str(launch.tokens_per_step)}
    return {name: value for name, value in sorted(found.items()) if is_choice(name)}


def _topics(evidence: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The facts of each kind of evidence; of its setup each kind by itself. A plain value is the one fact ``""``."""
    setup = evidence.get("setup", {})
    kinds = {name: value for name, value in evidence.items() if name != "setup"}
    kinds |= {f"setup.{name}": value for name, value in setup.items()}
    return {name: dict(codec.flat(value)) for name, value in kinds.items()}


# The distribution that a module is of, by the first word of its name; other modules are the user's own.
_DISTRIBUTIONS = {
    name: name.replace("_", "-")
    for name in "transformers accelerate liger_kernel flash_attn bitsandbytes torchao peft".split()
}


def _is_explained(topic: str, name: str, values: tuple[Any, Any], upgraded: Callable[[str], bool]) -> bool:
    """Whether another version, which is told by itself, brings another file, or a key of the configuration."""
    came_or_went = _ABSENT in values
    if topic == "setup.functions":
        # No upgrade of the stack explains that a kernel package is gone.
        return {*values} <= _OF_THE_STACK | {"false"} and any(map(upgraded, _STACK))
    if topic == "setup.sources":
        package = _DISTRIBUTIONS.get(name.partition(".")[0])
        # Which modules of a package there are follows from the model's classes, which are told.
        return package is not None and (came_or_went or upgraded(package))
    if topic == "setup.step":  # decorators of the packages' own come and go
        known = {module.partition(".")[0] for module in str(values[1]).split(" > ")} <= _OF_THE_STACK
        return known and any(map(upgraded, _STACK))
    return topic in _OWNERS and came_or_went and upgraded(_OWNERS[topic])


_STACK = ("torch", "transformers", "accelerate")
_OF_THE_STACK = frozenset({*_STACK, "liger_kernel", "contextlib", "functools", "built in", "none"})
# Whose fields a setup's topic lists.
_OWNERS = {"setup.config": "transformers", "setup.torch": "torch", "setup.optimizer": "torch"}


def _upgraded(a: Launch, b: Launch, package: str) -> bool:
    """Whether its version is another, but for the commit that it was built from."""
    then, now = (one.environment.versions.get(package, "").partition(" ")[0] for one in (a, b))
    return then != now


# What is ours has the name of its class, wherever that moves.
_OURS = re.compile(r"\bpytest_llmperf(?:\.\w+)*\.(?=\w)")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, str) and isinstance(b, str):
        return _OURS.sub("", a) == _OURS.sub("", b)
    # JSON has no tuples.
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return abs(a - b) <= _ROUNDED * abs(a) if isinstance(a, float) and isinstance(b, (int, float)) else bool(a == b)


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
