"""Former cases: what a test had stored before its settings changed, which begins a baseline anew. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.policy import METRICS
from pytest_llmperf.records.result import CaseResult, Check
from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.support.formats import in_sentence, percent

_TOLD = ("tokens_per_second_per_gpu", "peak_reserved_bytes")
_MOST_SETTINGS = 3


def test_of(node: str) -> str:
    """A node id without its parameters."""
    file, _, name = node.partition("::")
    return f"{file}::{name.partition('[')[0]}"


def nearest_line(spec: TrainSpec, node: str, stored: Iterable[Baseline], checks: Sequence[Check]) -> str:
    """The stored case of the test ``node`` that has most settings of ``spec``, beside its figures; empty: none."""
    own = [one for one in stored if test_of(one.recorded_by) == test_of(node) and one.digest != spec.digest]
    if not own or "::" not in node:  # a command is no test
        return ""
    near = min(own, key=lambda one: (len(_settings(one, spec)), one.recorded_by != node, one.id))
    changed = _settings(near, spec)
    more = f" and {len(changed) - _MOST_SETTINGS} more" if len(changed) > _MOST_SETTINGS else ""
    return (
        f"nearest stored case of this test: {near.id} ({_figures(near, checks)}); "
        f"settings: {', '.join(changed[:_MOST_SETTINGS])}{more}"
    )


def replaced(
    results: Sequence[CaseResult],
    stored: Sequence[Baseline],
    asked: AbstractSet[str],
    whole: AbstractSet[str],
    collected: Collection[str],
) -> Iterator[tuple[CaseResult, list[Baseline]]]:
    """Each result of ``results``, recorded for the first time, in the place of cases that its test no longer has.

    ``asked`` are the digests of the run, ``whole`` the tests that named all they have, ``collected`` all that their
    files have, whichever were chosen. What another choice of tests may still have is no former case.
    """
    own = {result.digest for result in results}
    recorded_by = {one.recorded_by for one in stored if one.digest not in own}
    for result in results:
        test = test_of(result.nodeid)
        siblings = [one for one in stored if test_of(one.recorded_by) == test and one.digest not in own]
        known = all(node in whole or node in recorded_by for node in collected if test_of(node) == test)
        explained = {digest for one in siblings for digest in one.anchor.replaces}  # and kept all the same
        gone = [
            one
            for one in siblings
            if one.digest not in asked | explained
            and (one.recorded_by in whole or (known and one.recorded_by not in collected))
        ]
        if gone:
            yield result, sorted(gone, key=lambda one: (one.recorded_by != result.nodeid, one.id))


def replaced_line(result: CaseResult, former: Baseline) -> str:
    """Why ``result`` was not recorded."""
    return (
        f"{result.nodeid}: {result.id} is not recorded: it replaces {former.id} of the same test "
        f'({_figures(former, result.checks)}); accept it with --perf-reason "why"; '
        "remove what is left over with --update-baselines=prune"
    )


def _settings(former: Baseline, spec: TrainSpec) -> list[str]:
    """``name: then -> now``; a setting that an older version did not store has its default, which the spec has too."""
    now = spec.to_dict()
    return [f"{name}: {then} -> {now.get(name)}" for name, then in former.spec.items() if then != now.get(name)]


def _figures(former: Baseline, checks: Sequence[Check]) -> str:
    told = []
    for check in checks:
        if check.metric in _TOLD:
            then = METRICS[check.metric].of(former.launches)
            was, now = in_sentence(then, check.unit), in_sentence(check.value, check.unit)
            told.append(f"{check.metric} {was} -> {now}, {percent(check.value / then - 1 if then else None)}")
    return "; ".join(told) or "no figures"
