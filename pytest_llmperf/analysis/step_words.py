"""What traces say, in words: of what a step consists, and what the difference between two points to.

The words of a failure are ASCII.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pytest_llmperf.analysis.step_difference import NameChange, StepDifference

# Below this a part's change is told to nobody.
_LEAST_SHARE = 0.1
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


def points_to(difference: StepDifference) -> str:
    """One line: of how much of a step, where that is known from what, in which parts, by which names."""
    data = difference.data
    is_data = data.change > 0 and data.change >= _MOST_OF_IT * difference.change
    if difference.is_on_host:
        return _on_host(difference)
    parts = [part for part in difference.parts if not (is_data and part is data)]
    moved = [part for part in parts if part.names]
    least = _LEAST_SHARE * max(abs(difference.change), *(abs(part.change) for part in difference.parts), 0.0)
    shown = [part for part in parts if abs(part.change) >= least and part.change][:_MOST_PARTS]
    shown += [part for part in moved if part not in shown][: _MOST_PARTS - len(shown)]
    # What is exact comes before what took longer by itself.
    shown = sorted(shown, key=lambda part: (not part.names, -abs(part.change)))
    words = [
        f"{part.name} {milliseconds(part.change)}" + (f" ({_names(part.names)})" if part.names else "")
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
    words[:0] = [*_odd_ranks(difference), *difference.causes]
    if last := difference.last_rank:
        wait = f"{last.waited_seconds * 1000:.1f} ms a step in exchanges"
        words.insert(0, f"the others wait for rank {last.rank}, {wait}")
    words.append(f"unexplained {milliseconds(difference.unexplained)}")
    return f"{milliseconds(difference.change)} of a traced step: {'; '.join(words)}"


def _on_host(difference: StepDifference) -> str:
    """What a CPU's step does, and no times."""
    words = [*_odd_ranks(difference), *difference.causes]
    words += [_waits(difference)] if difference.waits else []
    moved = [part for part in difference.parts if part.names]
    words += [f"{part.name} ({_names(part.names)})" for part in moved[:_MOST_PARTS]]
    data = difference.data
    if data.change > 0 and data.change >= max(_MOST_OF_IT * difference.change, _LEAST_SHARE * difference.before):
        words.insert(0, f"{data.name}, {data.after / difference.after * 100:.0f} % of the step")
    if not words:
        return "a traced step runs the same kernels, copies and waits; a CPU's times are noise"
    return f"a traced step on a CPU, whose times are noise: {'; '.join(words)}"


def _waits(difference: StepDifference) -> str:
    return f"waits of the host: {', '.join([_names(difference.waits), *difference.waits_at[:_MOST_NAMES]])}"


def _odd_ranks(difference: StepDifference) -> list[str]:
    words = []
    for odd in difference.odd_ranks[:_MOST_RANKS]:
        shown = [f"{short_kernel(name)} {more:+g}" for name, more in odd.names[:_MOST_NAMES]]
        more = [f"{len(odd.names) - _MOST_NAMES} more"] if len(odd.names) > _MOST_NAMES else []
        alone = " alone" if len(difference.odd_ranks) == 1 else ""
        words.append(f"on rank {odd.rank}{alone}: {', '.join([*shown, *more])}")
    if len(difference.odd_ranks) > _MOST_RANKS:
        words.append(f"{len(difference.odd_ranks) - _MOST_RANKS} more ranks stand apart")
    return words


def _names(changes: Sequence[NameChange]) -> str:
    shown = [f"{short_kernel(change.name)} {count_moved(change)}" for change in changes[:_MOST_NAMES]]
    more = [f"{len(changes) - _MOST_NAMES} more"] if len(changes) > _MOST_NAMES else []
    return ", ".join([*shown, *more])


def count_moved(change: NameChange) -> str:
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
    """A change."""
    text = f"{seconds * 1000:+.2f} ms" if abs(seconds) < _SMALL else f"{seconds * 1000:+.1f} ms"
    # Neither sign is true of what rounds to nothing.
    return "0.00 ms" if text in ("+0.00 ms", "-0.00 ms") else text
