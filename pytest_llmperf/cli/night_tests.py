"""How each pytest of a night ended, and the tests that no width has judged, by what all its files together say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from pytest_llmperf.records.result import FAILING
from pytest_llmperf.records.results_document import ResultsDocument, Skipped
from pytest_llmperf.support import grouped, user_input
from pytest_llmperf.support.files import text_of
from pytest_llmperf.support.formats import first_n

_MOST_NAMES = 10


@dataclass(frozen=True)
class LeftOut:
    """Widths that a night is not for: its suite may have tests for more GPUs than the site has."""

    widths: AbstractSet[int] = frozenset()
    wider: bool = False
    """Tests of more GPUs than the widest of the night."""

    def has(self, width: int, night: AbstractSet[int]) -> bool:
        """Whether a test of ``width`` is left out of a night of these widths."""
        return width in self.widths or (self.wider and width > max(night, default=0))


def left_out(words: Sequence[str]) -> LeftOut | None:
    """What ``words``, numbers or ``wider``, leave out; ``None`` where one of them is neither."""
    numbers = [user_input.count(word) for word in words if word != "wider"]
    widths = frozenset(number for number in numbers if number is not None)
    return LeftOut(widths, "wider" in words) if None not in numbers else None


@dataclass(frozen=True)
class Tests:
    """What the files say of the suite's tests, by node id."""

    collected: AbstractSet[str]
    """By any process, also those that planned only."""
    ended: AbstractSet[str]
    planned: Mapping[str, int]
    """The width that the plan gives each."""
    to_judge: AbstractSet[tuple[str, str]]
    """Node and case that the plan expects a result of."""
    at_home: AbstractSet[str]
    """That ended at a width which was theirs, as far as they said."""
    failed: AbstractSet[str]
    """With a failing case: what they would have asked for after that is no riddle."""
    skipped: Sequence[Skipped]
    judged: AbstractSet[tuple[str, str]]
    """Node and case."""
    skips: Mapping[str, str]
    """Why pytest skipped a test, as far as documents say."""

    @classmethod
    def of(cls, widths: Sequence[ResultsDocument], plans: Sequence[ResultsDocument]) -> Tests:
        suites = [each.suite.coverage for each in (*widths, *plans) if each.suite]
        results = [result for each in widths for result in each.results]
        cases = [case for each in plans for case in each.planned]
        planned: dict[str, int] = {}
        for case in cases:
            planned[case.nodeid] = max(case.width, planned.get(case.nodeid, 0))
        ended, at_home = {result.nodeid for result in results}, set[str]()
        for each in widths:
            said = {*each.suite.coverage.said} if each.suite else set()
            ended |= said
            at_home |= said - {case.nodeid for case in each.skipped if case.elsewhere == "test"}
        return cls(
            collected={node for suite in suites for node in suite.nodes},
            ended=ended,
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

    def not_reached(self, width: int) -> list[str]:
        """The tests that the plan gives this width and that never ended."""
        return sorted(node for node, its in self.planned.items() if its == width and node not in self.ended)


def unjudged(
    tests: Tests, widths: AbstractSet[int], reported: AbstractSet[int], without: LeftOut
) -> tuple[list[str], list[str]]:
    """A line for each reason with the tests that no width judged, and with those that the night is ``without``."""
    missed, meant = dict[str, set[str]](), dict[str, set[str]]()
    for node, width, why, case in _missed(tests, widths, reported):
        if width is not None and without.has(width, widths):
            meant.setdefault(f"asks for {width} GPU(s), which this night is without", set()).add(node)
        else:
            missed.setdefault(why, set()).add(f"{node} ({case})" if case else node)
    return _lines("not judged", missed), _lines("left out", meant)


def _missed(
    tests: Tests, widths: AbstractSet[int], reported: AbstractSet[int]
) -> Iterator[tuple[str, int | None, str, str]]:
    """Each node, its width where that is known, why, and the case where its test has others."""
    for node in tests.collected - tests.ended:
        width = tests.planned.get(node)
        if width not in reported:
            yield node, width, _why(width, widths), ""
    # What no number of GPUs changes is skipped for good; other cases are left to another width.
    skipped_for_good = {(case.nodeid, case.id) for case in tests.skipped if not case.elsewhere}
    for case in tests.skipped:
        node, name, width = case.nodeid, case.id, case.width
        is_done = case.elsewhere == "test" and node in tests.at_home
        if not case.elsewhere or is_done or (node, name) in tests.judged | skipped_for_good:
            continue
        if width not in widths:
            yield node, width, _why(width, widths), name
        elif case.elsewhere == "case":
            yield node, width, case.reason.removeprefix(f"{name}: "), name
        elif width not in reported:
            yield node, width, _why(width, widths), ""
    # Planned, and its test ended well without asking for it.
    for node, name in tests.to_judge - tests.judged - {(case.nodeid, case.id) for case in tests.skipped}:
        if node in tests.ended - tests.failed:
            yield node, tests.planned[node], "planned, and not asked for when the test ran", name


def _why(width: int | None, widths: AbstractSet[int]) -> str:
    if width is None:
        return "no width ran it, and it did not say what it asks for"
    if width in widths:
        return f"asks for {width} GPU(s), and that width did not come to it"
    have = " ".join(map(str, sorted(widths)))
    return f"asks for {width} GPU(s), and the night has {have}; add {width} to [suite] gpus, or to without"


def silent(tests: Tests) -> list[str]:
    """A line with the tests that ran, and judged nothing."""
    # Of a planned test something is missed, or it wanted launches alone.
    known = {node for node, _ in tests.judged} | {case.nodeid for case in tests.skipped} | {*tests.planned}
    nothing = "skipped, or it asked for nothing"
    return _lines("judged nothing", grouped((tests.skips.get(node) or nothing, node) for node in tests.ended - known))


def _lines(what: str, reasons: Mapping[str, Iterable[str]]) -> list[str]:
    return [f"{what}: {some_of(nodes)}: {why}" for why, nodes in sorted(reasons.items())]


def skipped(tests: Tests) -> list[tuple[str, str]]:
    """Each case that no width judged and that no other width is for, with its reason."""
    left = [case for case in tests.skipped if not case.elsewhere]
    found = {(case.nodeid, case.id): case.reason for case in left}
    return [(name, reason) for (node, name), reason in found.items() if (node, name) not in tests.judged]


def some_of(nodes: Iterable[str]) -> str:
    return first_n(sorted(nodes), _MOST_NAMES)


# Of pytest: a line of its own about what it cannot do, else the closing one.
# By its file, or as Python 3.14 calls a module: python -m pytest.
_REFUSED = re.compile(r"^(?:\S+ -m )?\S+: error: (.+)$")
_ERROR = re.compile(r"^(?:ERROR:? |INTERNALERROR> |E   +|!+ _pytest\.outcomes\.Exit: )(.+?)(?: !+)?$")
_CLOSING = re.compile(r"^(?:=+ )?((?:[0-9]+ \w+(?:, )?|no tests ran)+) in [0-9.]+s.*$")
# pytest names the file, and the reason stands above.
_UNCOLLECTED = re.compile(r"^ERROR (\S+)$")
# What ended Python itself.
_TRACEBACK = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception)(?:: .+)?)$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Ended:
    exit_code: int
    told: str


def ended(results: Path) -> Ended | None:
    """Beside the results file of a width; ``None`` where the script did not come to write it."""
    try:
        note = results.with_suffix(".exit").read_text(encoding="utf-8", errors="replace")
        code, _, log = note.strip().partition("\n")
        number = int(code)
    except (OSError, ValueError):
        return None
    is_file = bool(log) and Path(log).is_file()  # else a pipe, or a terminal
    line = pytest_line(text_of(Path(log)) if is_file else "", results.stem.rpartition("-")[2])
    told = f"pytest ended with exit code {number}" + (f": {line}" if line else "")
    return Ended(number, told + (f"; log: {Path(log)}" if is_file else ""))


def pytest_line(log: str, width: str) -> str:
    """What pytest said last of what it could not do at ``width``, of a log that may have several."""
    _, began, text = log.rpartition(f"llmperf: {width} GPU(s): begins\n")
    return last_word(text.partition(f"llmperf: {width} GPU(s): exit code")[0] if began else "")


def last_word(text: str) -> str:
    """Of what one pytest printed: what it could not do, with the file that it could not collect, else how it closed."""
    lines = [line.rstrip() for line in _COLOUR.sub("", text).splitlines()]
    for pattern in (_REFUSED, _ERROR, _CLOSING, _TRACEBACK):
        found = [match[1].strip() for match in map(pattern.match, lines) if match]
        files = [match[1] for match in map(_UNCOLLECTED.match, lines) if match] if pattern is _ERROR else []
        started = ("collecting ", "Interrupted: ")
        reasons = [word for word in found if word not in files and not word.startswith(started)] if files else []
        if found:
            return f"{files[-1]}: {reasons[-1]}" if reasons else found[-1]
    return ""
