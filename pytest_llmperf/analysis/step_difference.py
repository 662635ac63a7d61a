"""StepDifference: of what the difference between two traced steps consists, part by part, and that in words. Pure. A
part's change is that of its kernels' times, or of waits for it; what overlapping kernels make of it is unexplained."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from pytest_llmperf.analysis.likely_causes import CATEGORIES, COMMUNICATION, PATTERNS, category, likely_causes
from pytest_llmperf.analysis.waits import host_spends
from pytest_llmperf.records.trace import WORK, Key, RankWork, Trace, TraceRow, new_places
from pytest_llmperf.support.formats import first_n

# Of a step: exchanges beside the backward pass take some ranks a little longer, and a CPU's ranks share its cores.
_LEAST_WAIT, _LEAST_WAIT_ON_HOST = 0.05, 0.25
# Of a step, by which what it only exchanges has to grow.
_LEAST_LOST = 0.03


def odd_ranks(before: Trace, after: Trace) -> tuple[str, ...]:
    """What ranks do that the one in the middle does not, and did not before; nothing where most stand apart."""
    # As often in the mean of all ranks, all that older traces tell, by a baseline's digits: no rank began it since.
    means = ({((row.kind, row.name), f"{row.count:.6g}") for row in trace.rows} for trace in (before, after))
    as_before = set[Key]() if before.by_rank else {key for key, _ in set.intersection(*means)}
    found: dict[int, list[str]] = {}
    for rank, work in enumerate(after.by_rank):
        known = before.by_rank[rank].more if rank < len(before.by_rank) else {}
        more_now = {key: more for key, more in work.more.items() if key[0] != "payload"}  # bytes are no count
        # By as many digits as a baseline's file keeps: what is done each third step is 0.333333 there.
        moved = {key: more for key, more in more_now.items() if f"{known.get(key, 0.0):.6g}" != f"{more:.6g}"}
        if new := sorted((-abs(more), key[1], more) for key, more in moved.items() if key not in as_before):
            found[rank] = [f"{short_kernel(name)} {more:+g}" for _, name, more in new]
    if 2 * len(found) > len(after.by_rank):
        return ()
    alone, rest = " alone" if len(found) == 1 else "", len(found) - _MOST_RANKS
    told = [f"on rank {rank}{alone}: {first_n(names, _MOST_NAMES)}" for rank, names in found.items()]
    return (*told[:_MOST_RANKS], *([f"{rest} more ranks stand apart"] if rest > 0 else []))


def last_rank(before: Trace, after: Trace) -> str:
    """Which one the others wait for, if they wait longer than they did, and why, where that is known."""
    now, then = _last(after.by_rank), _last(before.by_rank)
    if now is None:
        return ""
    rank, waited = now
    waited_then = then[1] if then and then[0] == rank else 0.0
    least = (_LEAST_WAIT_ON_HOST if after.is_on_host else _LEAST_WAIT) * after.step_seconds
    # Of older traces only the mean of all ranks is known: half of two wait.
    more = after.exchanging_seconds - before.exchanging_seconds
    if min(waited - waited_then, 2 * more) <= least:
        return ""
    share, why = waited / after.step_seconds if after.step_seconds else 0.0, _why(after.by_rank, rank, waited)
    wait = f"{waited * 1000:.1f} ms a step in exchanges ({share * 100:.0f} % of it)"
    return f"the others wait for rank {rank}, {wait}{f': {why}' if why else ''}"


def _why(ranks: Sequence[RankWork], last: int, waited_seconds: float) -> str:
    """What of the ``last`` one takes longer than the others'."""
    own, others = ranks[last], [each.parts for number, each in enumerate(ranks) if number != last]
    if not all((own.parts, *others)):
        return ""
    usual = {part: median(each.get(part, 0.0) for each in others) for part in own.parts}
    longer = sorted(((seconds - usual[part], part) for part, seconds in own.parts.items()), reverse=True)
    told = [(more, part) for more, part in longer if more > _LEAST_TOLD * waited_seconds]
    if 2 * sum(more for more, _ in told) < waited_seconds:
        return ""
    more, part = told[0]
    if part == "work":
        if any(count > 0 and kind in WORK for (kind, _), count in own.more.items()):
            return f"it does more work, {more * 1000:.1f} ms"
        percent = more / (usual[part] or more) * 100
        return f"the same work takes it {percent:.0f} % longer (clocks, or others on its device)"
    return ", ".join(f"its {name} takes {longer * 1000:.1f} ms more" for longer, name in told)


def overlap_lost(before: Trace, after: Trace) -> str:
    """That exchanges which ran beside computing do so no more, with what shows of them; empty: they do."""
    was, shows = before.exposed_share, after.exposed_share
    if was is None or shows is None or shows - was < _LEAST_LOST:
        return ""
    # Where exchanges only take longer, or wait for a rank, as much of them is hidden as before.
    is_lost = 2 * (hidden_seconds(before) - hidden_seconds(after)) >= after.exposed_seconds - before.exposed_seconds
    shown = f"{was * 100:.0f} -> {shows * 100:.0f} % of the step"
    return f"overlap lost: exposed communication {shown}" if is_lost else ""


def _last(ranks: tuple[RankWork, ...]) -> tuple[int, float] | None:
    """The one that comes last to exchanges, and how much longer the others spend in those of a step, in the mean."""
    seconds = [work.exchange_seconds for work in ranks]
    if len(seconds) < 2 or not all(seconds):  # noqa: PLR2004 - one rank waits for nobody
        return None
    last = seconds.index(min(seconds))
    return last, fmean([each for rank, each in enumerate(seconds) if rank != last]) - seconds[last]


HOST, DATA = "idle: the host", "waiting for data"
#: Parts in the order in which they are shown.
ORDER = (*CATEGORIES, HOST, DATA)


@dataclass(frozen=True)
class NameChange:
    """One kernel, copy or operator."""

    name: str
    count: float
    """How many more a step; negative: fewer."""
    seconds: float
    is_new: bool = False
    is_gone: bool = False


@dataclass(frozen=True, kw_only=True)
class Part:
    """One category, or what the device waited for."""

    name: str
    before: float
    after: float
    """Seconds of a step."""
    names: tuple[NameChange, ...] = ()
    """Of which counts moved, most time first."""

    @property
    def change(self) -> float:
        return self.after - self.before


@dataclass(frozen=True, kw_only=True)
class StepDifference:
    before: float
    after: float
    parts: tuple[Part, ...]
    """That moved most first."""
    waits: tuple[NameChange, ...]
    """Of the host, whose counts moved."""
    waits_at: tuple[str, ...] = ()
    """The lines of Python that wait more often, as far as they are known."""
    causes: tuple[str, ...] = ()
    """What the counts are known to come from, in words."""
    odd_ranks: tuple[str, ...] = ()
    last_rank: str = ""
    overlap_lost: str = ""
    is_on_host: bool = False
    """Whether operators of a CPU stand for kernels, whose times say little."""

    @property
    def change(self) -> float:
        """In seconds; positive is slower."""
        return self.after - self.before

    @property
    def data(self) -> Part:
        """What is waited for the next batch."""
        return next(part for part in self.parts if part.name == DATA)

    @property
    def unexplained(self) -> float:
        """What no part tells: kernels that ran beside one another then, or do now."""
        return self.change - sum(part.change for part in self.parts)

    @property
    def is_the_same_work(self) -> bool:
        """Whether the same was done as often: then the hardware took longer, or the host."""
        return not self.waits and not any(part.names for part in self.parts)


def parts_of(trace: Trace) -> dict[str, float]:
    """Seconds of a step by category, and of waiting; exchanges as far as nothing else ran beside them."""
    sums: dict[str, float] = defaultdict(float)
    for row in _rows(trace, *WORK):
        if row.kind != "collective":
            sums[category(row.kind, row.name)] += row.seconds
    if _rows(trace, "collective"):
        sums[COMMUNICATION] += trace.exposed_seconds
    return {**sums, HOST: trace.idle_seconds, DATA: trace.data_seconds}


def hidden_seconds(trace: Trace) -> float:
    """For how long a step exchanges with other ranks while its device computes as well."""
    return sum(row.seconds for row in _rows(trace, "collective")) - trace.exposed_seconds


def _rows(trace: Trace, *kinds: str) -> list[TraceRow]:
    return [row for row in trace.rows if row.kind in kinds]


def step_difference(before: Trace, after: Trace) -> StepDifference:
    """What ``after`` does that ``before`` did not, and how long each took."""
    then, now = parts_of(before), parts_of(after)
    names = _names(_rows(before, *WORK), _rows(after, *WORK))
    parts = []
    for name in (one for one in ORDER if one in then or one in now):
        moved = tuple(change for part, change in names if part == name)
        parts.append(Part(name=name, before=then.get(name, 0.0), after=now.get(name, 0.0), names=moved))
    return StepDifference(
        before=before.step_seconds,
        after=after.step_seconds,
        parts=tuple(sorted(parts, key=lambda part: -abs(part.change))),
        waits=tuple(change for _, change in _names(_rows(before, "wait"), _rows(after, "wait"))),
        waits_at=tuple(new_places("synchronisations_per_step", before, after)),
        causes=(*host_spends(before, after), *likely_causes(before, after)),
        odd_ranks=odd_ranks(before, after),
        last_rank=last_rank(before, after),
        overlap_lost=overlap_lost(before, after),
        is_on_host=after.is_on_host,
    )


def _names(before: Sequence[TraceRow], after: Sequence[TraceRow]) -> list[tuple[str, NameChange]]:
    """Each name whose count moved, with its category, most time first."""
    then, now = ({(row.kind, row.name): row for row in rows} for rows in (before, after))
    found = []
    for key in {*then, *now}:
        was, is_ = then.get(key), now.get(key)
        count = (is_.count if is_ else 0.0) - (was.count if was else 0.0)
        seconds = (is_.seconds if is_ else 0.0) - (was.seconds if was else 0.0)
        if count:
            change = NameChange(key[1], count, seconds, is_new=was is None, is_gone=is_ is None)
            found.append((category(*key), change))
    return sorted(found, key=lambda each: (-abs(each[1].seconds), each[1].name))


# Relevant differences: which of the things that are not as they were may have moved the parts of a step that moved.

# Less of what moved is no reason to look there.
_LEAST_SHARE = 0.1


def ranked(lines: Sequence[str], difference: StepDifference) -> tuple[str, ...]:
    """``lines``, each ``name: then -> now``, those of parts that moved most first; all others in their own order."""
    return tuple(sorted(lines, key=lambda line: -_weight(line, difference)))


def relevant(lines: Sequence[str], difference: StepDifference) -> tuple[str, ...]:
    """Those of ``lines`` that a part which moved may be moved by, best first."""
    return tuple(line for line in ranked(lines, difference) if _weight(line, difference) > 0)


def _weight(line: str, difference: StepDifference) -> float:
    name = line.partition(": ")[0]
    if difference.is_the_same_work and not PATTERNS["slows"]["the same work"].search(name):
        return 0.0
    moves = {part.name: abs(part.change) for part in difference.parts}
    least = _LEAST_SHARE * max(moves.values(), default=0.0)
    by = PATTERNS["moved by"]
    return max((move for part, move in moves.items() if move > least and by[part].search(name)), default=0.0)


# In words, which are ASCII: what the difference between two points to.

# Below this a part's change is told to nobody.
_LEAST_TOLD = 0.1
# Of a change: this much is what it is about.
_MOST_OF_IT = 0.5
# From here on hundredths of a millisecond are noise.
_SMALL = 0.01
_MOST_PARTS, _MOST_NAMES, _MOST_RANKS, _NAME_WIDTH = 3, 2, 2, 44
# What templates and namespaces wrap around the word that says what a kernel does.
_WRAPPED = re.compile(r"^(?:void |std::|at::native::|at::cuda::|\(anonymous namespace\)::|cub::\w+::|detail::)+")
# So that what it computes, and in which direction, has room.
_GENERATED = re.compile(r"^cudnn_generated_fort_native_")
# Those say how many arguments there are; what is done with them stands inside.
_ARITY = re.compile(r"(A|B)?(Unary|Binary)Functor$")
_FUNCTOR = re.compile(r"(\w*(?:Functor|Op|Ops|_kernel_cuda|kernel_impl)\w*)")


def points_to(difference: StepDifference, *, of_speed: bool = True) -> str:
    """One line: how much of a step, in which parts, by which names. ``of_speed``: whether it explains a speed."""
    data = difference.data
    is_data = data.change > 0 and data.change >= _MOST_OF_IT * difference.change
    if difference.is_on_host:
        noise = "; a CPU's times are noise" if of_speed else ""
        return _on_host(difference) or f"a traced step runs the same kernels, copies and waits{noise}"
    parts = [part for part in difference.parts if not (is_data and part is data)]
    moved = [part for part in parts if part.names]
    least = _LEAST_TOLD * max(abs(difference.change), *(abs(part.change) for part in difference.parts), 0.0)
    shown = [part for part in parts if abs(part.change) >= least and part.change][:_MOST_PARTS]
    shown += [part for part in moved if part not in shown][: _MOST_PARTS - len(shown)]
    # What is exact comes before what took longer by itself.
    shown = sorted(shown, key=lambda part: (not part.names, -abs(part.change)))
    words = [
        f"{part.name} {milliseconds(part.change)}" + (f" ({_named(part.names)})" if part.names else "")
        for part in shown
    ]
    if difference.waits:
        words.insert(0, _waits(difference))
    if difference.is_the_same_work:
        words.insert(0, "the same kernels, copies and waits")
    if is_data and data.change >= least:
        share = data.after / difference.after if difference.after else 0.0
        words.insert(0, f"{milliseconds(data.change)} {data.name}, {share * 100:.0f} % of the step")
    # Whoever is not as the others, which the mean of all does not say.
    words[:0] = [*unseen(difference), *difference.odd_ranks, *difference.causes]
    words.append(f"unexplained {milliseconds(difference.unexplained)}")
    return f"{milliseconds(difference.change)} of a traced step: {'; '.join(words)}"


def _on_host(difference: StepDifference) -> str:
    words = [*unseen(difference), *difference.odd_ranks, *difference.causes]
    words += [_waits(difference)] if difference.waits else []
    moved = [part for part in difference.parts if part.names]
    words += [f"{part.name} ({_named(part.names)})" for part in moved[:_MOST_PARTS]]
    data = difference.data
    if data.change > 0 and data.change >= max(_MOST_OF_IT * difference.change, _LEAST_TOLD * difference.before):
        words.insert(0, f"{data.name}, {data.after / difference.after * 100:.0f} % of the step")
    return f"a traced step on a CPU, whose times are noise: {'; '.join(words)}" if words else ""


def unseen(difference: StepDifference) -> Iterator[str]:
    """What no count says and the clock of the whole need not show: whom all wait for, and that exchanges are."""
    yield from filter(None, (difference.last_rank, difference.overlap_lost))


def _waits(difference: StepDifference) -> str:
    return f"waits of the host: {', '.join([_named(difference.waits), *difference.waits_at[:_MOST_NAMES]])}"


def _named(changes: Sequence[NameChange]) -> str:
    return first_n([f"{short_kernel(change.name)} {_count_moved(change)}" for change in changes], _MOST_NAMES)


def _count_moved(change: NameChange) -> str:
    """``33 gone``, ``66 new``, ``+19``: a step."""
    how = "new" if change.is_new else "gone" if change.is_gone else ""
    return f"{abs(change.count):g} {how}" if how else f"{change.count:+g}"


def short_kernel(name: str) -> str:
    """A kernel's name as a line has room for it: what it is instantiated with says more than the template's own."""
    bare = _GENERATED.sub("cudnn_", name)
    bare = _WRAPPED.sub("", bare.encode("ascii", "backslashreplace").decode("ascii"))
    head, *_ = re.split(r"(?<=\S)[<(]", bare, maxsplit=1)
    functors = [each for each in _FUNCTOR.findall(bare[len(head) :]) if not each.startswith("gpu_kernel_impl")]
    telling = [each for each in functors if not _ARITY.match(each)] or functors
    text = f"{head}<{telling[0]}>" if telling else head or "(unnamed)"
    return text if len(text) <= _NAME_WIDTH else f"{text[: _NAME_WIDTH - 3]}..."


def milliseconds(seconds: float) -> str:
    text = f"{seconds * 1000:+.2f} ms" if abs(seconds) < _SMALL else f"{seconds * 1000:+.1f} ms"
    # Neither sign is true of what rounds to nothing.
    return "0.00 ms" if text in ("+0.00 ms", "-0.00 ms") else text
