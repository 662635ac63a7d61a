"""Likely causes: what a change of counts, which are exact, is known to come from, in a few words of ASCII. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache

from pytest_llmperf.records.trace import WORK, Trace, TraceRow
from pytest_llmperf.support.files import shipped
from pytest_llmperf.support.formats import first_n

MATRIX, ATTENTION, NORM = "matrix products", "attention", "normalisation and activation"
LOSS, OPTIMIZER, COMMUNICATION = "loss", "optimizer", "communication"
COPIES, ELEMENTWISE = "copies and casts", "elementwise and others"
#: In the order in which they are shown.
CATEGORIES = (MATRIX, ATTENTION, NORM, LOSS, OPTIMIZER, COMMUNICATION, COPIES, ELEMENTWISE)
_BY_KIND = {"collective": COMMUNICATION, "copy": COPIES, "fill": COPIES}

_READ = shipped(__file__, "categories.ini")
#: By what they are for, and by part of a step.
PATTERNS = {use: {part: re.compile(told) for part, told in _READ[use].items()} for use in _READ.sections()}
_COMPILED = re.compile(r"triton_(poi|red|per|for)_fused_")


@cache
def category(kind: str, name: str) -> str:
    """Of a row of a trace that keeps the device busy."""
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    rules = PATTERNS["compiled" if _COMPILED.match(name) else "any"]
    return next((found for found, pattern in rules.items() if pattern.search(name)), ELEMENTWISE)


Rows = list[TraceRow]


def likely_causes(before: Trace, after: Trace) -> tuple[str, ...]:
    """What the counts of ``after`` are known to come from, seen from ``before``; most telling first."""
    then, now = ([row for row in trace.rows if row.kind in WORK] for trace in (before, after))
    ways = (_multiplied, _recomputed, _other_kinds, _fused_by_hand, _otherwise_compiled, _cast_more)
    found = [line for way in ways for line in way(then, now)]
    # Memory that is asked of the driver, or given back, where the steps before had theirs; now and then all do.
    asked, asks = ({row.name: row.count for row in one.rows if row.kind == "allocation"} for one in (before, after))
    more = {name: asks[name] - asked.get(name, 0.0) for name in asks if asks[name] > asked.get(name, 0.0)}
    if sum(more.values()) >= 1:
        found.append(f"the allocator asks the driver: {_most(more, '{} {:+.3g}')} a step")
    return tuple(found)


# Parts that every micro-batch runs through.
_OF_A_MICRO_BATCH = (MATRIX, ATTENTION, NORM, LOSS)
# A few products and copies are chosen by shape.
_NEARLY = 0.1


def _multiplied(then: Rows, now: Rows) -> Iterator[str]:
    """More micro-batches in a step: all of forward and backward is there more often, the optimizer's as often."""
    before, after = _counts(then), _counts(now)
    shared = [part for part in _OF_A_MICRO_BATCH if before.get(part) and after.get(part)]
    if MATRIX not in shared or len(shared) < 2:  # noqa: PLR2004 - one part alone may have changed by itself
        return
    for less, more, fewer in ((before, after, False), (after, before, True)):
        ratios = [more[part] / less[part] for part in shared]
        times = round(ratios[0])
        if times > 1 and all(abs(ratio / times - 1) <= _NEARLY for ratio in ratios):
            how = f"{times} times" if times > 2 else "twice"  # noqa: PLR2004
            how = f"once instead of {how}" if fewer else how
            is_whole = less.get(OPTIMIZER) and round(more[OPTIMIZER] / less[OPTIMIZER]) == times
            parts = "" if is_whole else "of forward and backward "
            yield f"every kernel {parts}{how}" + ("" if is_whole else " (micro-batches of a step)")
            return


# Each library names what it computes backwards, not all what they compute forwards.
_BACKWARD = re.compile(r"bwd|bprop|backward|fmha_cutlassB", re.IGNORECASE)


def _recomputed(then: Rows, now: Rows) -> Iterator[str]:
    """Forward kernels are there again, backward ones as often as before, and products between the two."""
    before, after = _counts(then), _counts(now)
    # Calls of attention, norms and activations, forwards and backwards.
    passes = [[0.0, 0.0], [0.0, 0.0]]
    for calls, rows in zip(passes, (then, now), strict=True):
        for row in rows:
            if category(row.kind, row.name) in (ATTENTION, NORM):
                calls[bool(_BACKWARD.search(row.name))] += row.count
    if not all((*passes[0], *passes[1], before.get(MATRIX), after.get(MATRIX))) or passes[0][1] != passes[1][1]:
        return
    forward = passes[1][0] / passes[0][0]
    products = after[MATRIX] / before[MATRIX]
    if 1 < forward <= 2 and 1 < products < 2:  # noqa: PLR2004 - at most all of it, once more
        if forward < 1.5:  # noqa: PLR2004 - of most layers, or of a few
            yield f"{forward - 1:.0%} of forward kernels once more: a part of the model runs twice, or is recomputed"
        else:
            yield "forward kernels once more: activations are recomputed (gradient checkpointing) or a model runs twice"
    elif 0.5 <= forward < 1 and 0.5 < products < 1:  # noqa: PLR2004
        yield "forward kernels less often: activations are not recomputed as they were (gradient checkpointing)"


# Products of fp32 as cuBLAS and CUTLASS name those that use no tensor core.
_PLAIN = re.compile(r"simt_sgemm|(ampere|volta|maxwell|turing|hopper)_sgemm|f32f32_f32f32_f32|ffma", re.IGNORECASE)
_MOST, _FEW = 0.5, 0.1


def _other_kinds(then: Rows, now: Rows) -> Iterator[str]:
    was, is_ = (_family(rows, ATTENTION, PATTERNS["attentions"]) for rows in (then, now))
    if was and is_ and was != is_:
        what = "attention is eager: products, a softmax, casts" if is_ == "eager" else f"attention by {is_} kernels"
        yield f"{what} (was {was})"
    plain = [_plain_share(rows) for rows in (then, now)]
    if plain[0] < _FEW and plain[1] > _MOST:
        yield "matrix products in plain fp32, without tensor cores (TF32, autocast)"
    elif plain[1] < _FEW and plain[0] > _MOST:
        yield "matrix products on tensor cores, that were plain fp32 (TF32, autocast)"
    was, is_ = (_family(rows, OPTIMIZER, PATTERNS["optimizers"]) for rows in (then, now))
    if was and is_ and was != is_:
        yield f"the optimizer's step is {is_} (was {was})"


# A function that somebody has written in Triton; inductor's kernels and those of libraries are named otherwise.
_FUNCTION = re.compile(r"(?!triton_|nvjet|cudnn|fmha|nccl)(_[a-z]\w*|[a-z]\w*_kernel)$")
_ROLE = re.compile(r"_(kernel|forward|backward|fwd|bwd)(?=_|$)")
_MOST_FAMILIES = 4


def _fused_by_hand(then: Rows, now: Rows) -> Iterator[str]:
    was, is_ = (
        {row.name: row.count for row in rows if row.kind == "kernel" and _FUNCTION.match(row.name)}
        for rows in (then, now)
    )
    for word, one, other in (("gone", was, is_), ("new", is_, was)):
        families: dict[str, float] = defaultdict(float)
        for name in one.keys() - other.keys():
            family = _ROLE.sub("", name)
            families[family if family == name else f"{family}_*"] += one[name]
        if families:
            yield f"fused kernels {word}: {_most(families, '{} {:g}')}"


_INDUCTORS = re.compile(r"triton_[a-z]{3}_fused_")


def _otherwise_compiled(then: Rows, now: Rows) -> Iterator[str]:
    """Where a graph breaks or a layer falls back, inductor's kernels are others, and named after what they fuse."""
    was, is_ = ({row.name: row.count for row in rows if _INDUCTORS.match(row.name)} for rows in (then, now))
    if was and not is_:
        yield f"no layer is compiled, as {sum(was.values()):g} kernels of a step were"
    elif is_ and not was:
        yield f"{sum(is_.values()):g} kernels of a step are compiled, none was"
    elif was.keys() != is_.keys():
        gone, new = (sum(one[name] for name in one.keys() - other.keys()) for one, other in ((was, is_), (is_, was)))
        yield f"other graphs are compiled: {gone:g} of inductor's kernels gone, {new:g} new"


def _cast_more(then: Rows, now: Rows) -> Iterator[str]:
    """Nothing else has another count: the same model, converted more often."""
    was, is_ = ({(row.kind, row.name): row.count for row in rows} for rows in (then, now))
    moved = {key: is_.get(key, 0.0) - was.get(key, 0.0) for key in {*was, *is_} if is_.get(key) != was.get(key)}
    only_casts = all(kind == "kernel" and category(kind, name) == COPIES for kind, name in moved)
    if moved and only_casts and sum(moved.values()) > 0:
        yield f"casts and copies {sum(moved.values()):+g} alone (dtypes, autocast's cache)"


def _most(counts: Mapping[str, float], line: str) -> str:
    told = [line.format(name, count) for name, count in sorted(counts.items(), key=lambda each: (-each[1], each[0]))]
    return first_n(told, _MOST_FAMILIES)


def _counts(rows: Rows) -> dict[str, float]:
    counts: dict[str, float] = defaultdict(float)
    for row in rows:
        counts[category(row.kind, row.name)] += row.count
    return dict(counts)


def _family(rows: Rows, part: str, families: Mapping[str, re.Pattern[str]]) -> str:
    names = [row.name for row in rows if category(row.kind, row.name) == part]
    return next((family for family, pattern in families.items() if any(pattern.search(name) for name in names)), "")


def _plain_share(rows: Rows) -> float:
    products = [row for row in rows if category(row.kind, row.name) == MATRIX]
    whole = sum(row.seconds for row in products)
    return sum(row.seconds for row in products if _PLAIN.search(row.name)) / whole if whole else 0.0
