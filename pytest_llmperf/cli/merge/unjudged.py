"""The tests of a night that no width has judged: what all its files together say was asked for, and was not told of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from pytest_llmperf.cli.left_out_widths import LeftOut
from pytest_llmperf.records.result import FAILING
from pytest_llmperf.records.results_document import ResultsDocument, Skipped

_MOST_NAMES = 10


@dataclass(frozen=True)
class Tests:
    """What the files say of the suite's tests, by node id."""

    collected: AbstractSet[str]
    """By any process, also those that planned only."""
    ended: AbstractSet[str]
    """At a width."""
    planned: Mapping[str, int]
    """The width that the plan gives each."""
    to_judge: AbstractSet[tuple[str, str]]
    """Node and case, of which the plan says that a result comes."""
    at_home: AbstractSet[str]
    """That ended at a width which was theirs, as far as they said."""
    failed: AbstractSet[str]
    """Of which a case does not hold: what it would have asked for after that is no riddle."""
    skipped: Sequence[Skipped]
    judged: AbstractSet[tuple[str, str]]
    """Node and case."""
    skips: Mapping[str, str]
    """Why pytest skipped a test, as far as documents say."""

    @classmethod
    def of(cls, widths: Sequence[ResultsDocument], plans: Sequence[ResultsDocument]) -> Tests:
        """Of the documents of widths, and of those of plans."""
        results = [result for each in widths for result in each.results]
        at_home, said, planned = set[str](), set[str](), dict[str, int]()
        for each in widths:
            left = {case.nodeid for case in each.skipped if case.elsewhere == "test"}
            if each.suite is not None:
                said |= {*each.suite.coverage.said}
                at_home |= {*each.suite.coverage.said} - left
        cases = [case for each in plans for case in each.planned]
        for case in cases:
            planned[case.nodeid] = max(case.width, planned.get(case.nodeid, 0))
        return cls(
            collected={node for each in (*widths, *plans) if each.suite for node in each.suite.coverage.nodes},
            ended=said | {result.nodeid for result in results},
            planned=planned,
            to_judge={(case.nodeid, case.id) for case in cases if case.judges},
            at_home=at_home,
            failed={result.nodeid for result in results if result.verdict in FAILING},
            skipped=[case for each in widths for case in each.skipped if case.nodeid],
            judged={(result.nodeid, result.id) for result in results},
            skips={
                test.nodeid: test.reason.removeprefix("Skipped: ")
                for each in widths
                for test in each.tests
                if test.outcome == "skipped"
            },
        )

    def of_width(self, width: int) -> bool:
        """Whether the plan has a test of this width."""
        return width in self.planned.values()

    def not_reached(self, width: int) -> list[str]:
        """Of the tests that the plan gives this width, those that never ended."""
        return sorted(node for node, its in self.planned.items() if its == width and node not in self.ended)


def unjudged(
    tests: Tests, widths: AbstractSet[int], told: AbstractSet[int], without: LeftOut
) -> tuple[list[str], list[str]]:
    """A line for each reason, with the tests: of those that were missed, and of those that the night is ``without``.

    ``widths`` are the night's; tests of widths that are ``told`` of are left to whoever tells.
    """
    missed, meant = dict[str, set[str]](), dict[str, set[str]]()
    found = (*_never_ended(tests, widths, told), *_elsewhere(tests, widths, told), *_not_asked_for(tests))
    for node, width, why, case in found:
        if width is not None and without.has(width, widths):
            meant.setdefault(f"asks for {width} GPU(s), which this night is without", set()).add(node)
        else:
            missed.setdefault(why, set()).add(f"{node} ({case})" if case else node)
    return _lines("not judged", missed), _lines("left out", meant)


# Its node, its width where that is known, why, and its case where the test has others.
_Missed = tuple[str, int | None, str, str]


def _never_ended(tests: Tests, widths: AbstractSet[int], told: AbstractSet[int]) -> Iterator[_Missed]:
    for node in tests.collected - tests.ended:
        width = tests.planned.get(node)
        if width not in told:
            yield node, width, _why(width, widths), ""


def _elsewhere(tests: Tests, widths: AbstractSet[int], told: AbstractSet[int]) -> Iterator[_Missed]:
    """Left by every width that came to it to another one."""
    for case in tests.skipped:
        node, width = case.nodeid, case.width
        if not case.elsewhere or _is_told(case, tests):
            continue
        if width not in widths:
            yield node, width, _why(width, widths), case.id
        elif case.elsewhere == "case":
            yield node, width, case.reason.removeprefix(f"{case.id}: "), case.id
        elif width not in told:
            yield node, width, _why(width, widths), ""


def _not_asked_for(tests: Tests) -> Iterator[_Missed]:
    """Planned, and not heard of from a test that ended well."""
    skipped = {(case.nodeid, case.id) for case in tests.skipped}
    for node, name in tests.to_judge - tests.judged - skipped:
        if node in tests.ended - tests.failed:
            yield node, tests.planned[node], "planned, and not asked for when the test ran", name


def _lines(what: str, reasons: Mapping[str, AbstractSet[str]]) -> list[str]:
    return [f"{what}: {some_of(nodes)}: {why}" for why, nodes in sorted(reasons.items())]


def silent(tests: Tests) -> list[str]:
    """A line with the tests that ran and of which nothing is known: that is their own doing."""
    # Of those that the plan knows something is missed, or launches are all that they wanted.
    told = {node for node, _ in tests.judged} | {case.nodeid for case in tests.skipped} | {*tests.planned}
    why: dict[str, set[str]] = {}
    for node in tests.ended - told:
        why.setdefault(tests.skips.get(node) or "skipped, or it asked for nothing", set()).add(node)
    return [f"judged nothing: {some_of(nodes)}: {reason}" for reason, nodes in sorted(why.items())]


def skipped(tests: Tests) -> list[tuple[str, str]]:
    """Each case that no width judged and that no other width is for, with its reason."""
    left = [case for case in tests.skipped if not case.elsewhere]
    found = {(case.nodeid, case.id): case.reason for case in left}
    return [(name, reason) for (node, name), reason in found.items() if (node, name) not in tests.judged]


def some_of(nodes: Iterable[str]) -> str:
    """Some of them, and how many more."""
    found = sorted(nodes)
    more = [f"{len(found) - _MOST_NAMES} more"] if len(found) > _MOST_NAMES else []
    return ", ".join([*found[:_MOST_NAMES], *more])


def _is_told(case: Skipped, tests: Tests) -> bool:
    """Whether another width has judged it, or skipped it for what no number of GPUs changes."""
    if case.elsewhere == "test" and case.nodeid in tests.at_home:
        return True
    key = (case.nodeid, case.id)
    others = (other for other in tests.skipped if not other.elsewhere)
    return key in tests.judged or any((other.nodeid, other.id) == key for other in others)


def _why(width: int | None, widths: AbstractSet[int]) -> str:
    if width is None:
        return "no width ran it, and it did not say what it asks for"
    if width in widths:
        return f"asks for {width} GPU(s), and that width did not come to it"
    have = " ".join(map(str, sorted(widths)))
    return f"asks for {width} GPU(s), and the night has {have}; add {width} to [suite] gpus, or to without"


__all__ = ["Tests", "silent", "skipped", "some_of", "unjudged"]
