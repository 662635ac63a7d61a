"""Exact counts: what a step does, held against the baseline's without tolerance. Pure.

Two launches of one spec with the same versions run the same kernels the same number of times on every host of a machine
kind (docs/measurements/traces.md: how often that was seen). So one launch decides. What costs time and is easily
written by mistake - a wait for the device, a copy, a broken graph - is ``regressed``; another number of kernels at the
same speed is ``changed`` (docs/decisions/0029).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytest_llmperf.judge.tracing.stored_trace import StoredTrace, other_counts
from pytest_llmperf.records.launch import OLDER, Launch
from pytest_llmperf.records.result import Check, Verdict
from pytest_llmperf.records.trace import COUNTED, UNWANTED, Trace

#: Of which more is a loss, whatever the clock saw.
COSTLY = frozenset(
    {"copies_per_step", "synchronisations_per_step", "graph_breaks", "recompilations", "allocator_retries"}
)
METRICS = (*COUNTED, "graph_breaks", "recompilations", "allocator_retries")

_MOST_NAMES = 3


def count_checks(launches: Sequence[Launch], stored: StoredTrace | None) -> tuple[Check, ...]:
    """A check for each count that the launches have; without a verdict where nothing gates it."""
    newest = StoredTrace.of(launches)
    if not launches or (newest is None and stored is None):
        return ()
    gate = stored if stored and not stored.other_versions(launches[-1]) and not _is_tuned(launches[-1]) else None
    found = []
    for name in METRICS:
        if name in COUNTED and not (newest and _applies(name, newest)):
            continue
        # What is counted without a trace gates launches that could not be traced as well.
        counts = [count for launch in launches if (count := count_of(launch, name)) is not None]
        if not counts:
            continue
        if gate is None or (baseline := _stored_count(gate, name)) is None:
            found.append(Check(metric=name, value=min(counts), unit="1"))
            continue
        # Of launches that differ, which should not be, the mildest.
        value = min(counts, key=lambda count: abs(count - baseline))
        verdict = _verdict(name, counts, baseline)
        if verdict == "pass" and not _is_timed(launches[-1]) and _has_other_names(name, launches, gate):
            verdict = "changed"
        found.append(
            Check(
                metric=name,
                value=value,
                unit="1",
                baseline=baseline,
                tolerance=0.0,
                limit=baseline,
                change=value / baseline - 1 if baseline else None,
                verdict=verdict,
                detail="" if verdict == "pass" or newest is None else _named(name, newest, gate),
            )
        )
    return tuple(found)


def trace_notes(launches: Sequence[Launch], stored: StoredTrace | None) -> tuple[str, ...]:
    """What the checks do not say: why there is no trace, that names moved, what another version does."""
    why = dict.fromkeys(launch.trace.none for launch in launches if launch.trace.none not in ("", OLDER, UNWANTED))
    notes = [f"no trace: {reason}" for reason in why]
    newest = next((launch for launch in reversed(launches) if launch.trace), None)
    if newest is None or stored is None:
        return tuple(notes)
    if _are_unlike(launches):
        notes.append("its launches were not traced alike, though exact counts should be the same")
    then, now = stored.trace, newest.trace
    others = stored.other_versions(newest)
    if others:
        moved = [
            f"{name.removesuffix('_per_step')} {then.count(name):g} -> {now.count(name):g}"
            for name in COUNTED
            if then.count(name) != now.count(name)
        ]
        if moved:
            notes.append(f"a step has {', '.join(moved)} with other versions ({', '.join(others[:_MOST_NAMES])})")
    elif _is_timed(launches[-1]) and then.counts != now.counts:
        gone, come = _moved(then.counts, now.counts)
        chosen = "max-autotune" if _is_tuned(launches[-1]) else "this environment"
        notes.append(f"not the same kernels, which {chosen} chose by time: {_some(gone)} -> {_some(come)}")
    return tuple(notes)


def _is_tuned(launch: Launch) -> bool:
    """Whether its kernels were chosen by timing them: nearly tied ones change from process to process."""
    return str(launch.evidence.get("torch_compile_mode", "")).startswith("max-autotune")


def _is_timed(launch: Launch) -> bool:
    """The same, and where the user's environment asks for it: of the kernels' names nothing is expected."""
    variables, torch = launch.environment.variables, launch.evidence.get("setup", {}).get("torch", {})
    asks = any(variables.get(f"TORCHINDUCTOR_MAX_AUTOTUNE{which}", "0") == "1" for which in ("", "_GEMM"))
    is_compiled = bool(launch.evidence.get("compiled_graphs"))
    is_on_gpu = launch.evidence.get("device_type") == "cuda"
    return _is_tuned(launch) or (asks and is_compiled) or (is_on_gpu and torch.get("cudnn_benchmark") is True)


def _applies(name: str, newest: StoredTrace) -> bool:
    """A host's operators, or a device's work; copies and waits are of both."""
    other = "kernels_per_step" if newest.trace.is_on_host else "operators_per_step"
    return name != other


def count_of(launch: Launch, name: str) -> float | None:
    """Of a metric of ``METRICS``; ``None`` where the launch does not tell."""
    if name not in COUNTED:
        return other_counts(launch).get(name)
    return launch.trace.count(name) if launch.trace else None


def _stored_count(stored: StoredTrace, name: str) -> float | None:
    return stored.trace.count(name) if name in COUNTED else stored.counts.get(name)


def _verdict(name: str, counts: Sequence[float], baseline: float) -> Verdict:
    if all(count == baseline for count in counts) or min(counts) <= baseline <= max(counts):
        return "pass"
    return "regressed" if name in COSTLY and min(counts) > baseline else "changed"


def _has_other_names(metric: str, launches: Sequence[Launch], stored: StoredTrace) -> bool:
    """Whether no launch ran the baseline's kernels, though as many: what is equally often is another implementation."""
    if metric not in COUNTED:
        return False
    then = _of_metric(metric, stored.trace)
    return all(_of_metric(metric, launch.trace) != then for launch in launches if launch.trace)


def _of_metric(metric: str, trace: Trace) -> Counts:
    # A file keeps six digits of a mean over ranks.
    return {key: float(f"{count:.6g}") for key, count in trace.counts.items() if key[0] in COUNTED[metric]}


def _are_unlike(launches: Sequence[Launch]) -> bool:
    traces = [launch.trace.counts for launch in launches if launch.trace]
    return any(trace != traces[0] for trace in traces)


def _named(name: str, newest: StoredTrace, stored: StoredTrace) -> str:
    """What came and what went, the most frequent first."""
    if name not in COUNTED:
        return ""
    then, now = _of_metric(name, stored.trace), _of_metric(name, newest.trace)
    gone, come = _moved(then, now)
    words = [f"{word} {_some(names)}" for word, names in (("more:", come), ("fewer:", gone)) if names]
    ranks = newest.trace.ranks
    is_mean = any(count % 1 for each in (then, now) for count in each.values())
    return "; ".join(words) + (f"; means of {ranks} ranks, which differ" if is_mean and ranks > 1 else "")


Counts = dict[tuple[str, str], float]


def _moved(then: Counts, now: Counts) -> tuple[list[str], list[str]]:
    """How much less and how much more of each name, most first."""
    apart = {key: now.get(key, 0.0) - then.get(key, 0.0) for key in {*then, *now}}

    def told(wanted: Callable[[float], bool]) -> list[str]:
        found = [(-abs(count), key[1]) for key, count in apart.items() if wanted(count)]
        return [f"{name} ({-size:g} a step)" for size, name in sorted(found)]

    return told(lambda count: count < 0), told(lambda count: count > 0)


_NAME_WIDTH = 60


def _some(names: Sequence[str]) -> str:
    shown = [
        name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH // 2]}...{name[-_NAME_WIDTH // 2 :]}"
        for name in names
    ]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(shown[:_MOST_NAMES]) + more
