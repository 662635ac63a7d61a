"""ExportedRun: what other tools are told of ``--perf-json`` documents, each case once; what is no number is absent."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pytest_llmperf.records.result import FAILING, VERDICTS, CaseResult
from pytest_llmperf.report.text import one_line

_MOST_CHANGES = 3
_DIGEST_SHOWN = 8
_TESTS_FAILED = 1  # pytest's own exit code, of which the cases tell


@dataclass(frozen=True, kw_only=True)
class ExportedFigure:
    """One metric of one case, in the unit of the document (bytes, seconds)."""

    metric: str
    value: float | None
    unit: str = ""
    baseline: float | None = None
    limit: float | None = None
    change: float | None = None
    """A fraction of the baseline."""
    detectable: float | None = None
    times_slower: float | None = None
    """That still passes, where it is a multiple."""


@dataclass(frozen=True, kw_only=True)
class ExportedCase:
    """One case; its texts are one line each."""

    name: str
    """Its id; with its digest where another case of the machine has the same id."""
    digest: str = ""
    machine: str = ""
    """Machine kind; empty where the document does not say."""
    nodeid: str = ""
    verdict: str
    reason: str = ""
    figures: tuple[ExportedFigure, ...] = ()
    changed: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    circumstances: tuple[str, ...] = ()
    """Where it ran and what was otherwise there, where it is no ``pass``."""
    is_recorded: bool = False
    seconds: float = 0.0
    """Of all its launches."""
    launched_at: float | None = None
    """Of its last launch, seconds since 1970."""

    @property
    def is_failing(self) -> bool:
        """Whether its verdict fails a run that is not strict; what was recorded does not."""
        return self.verdict in FAILING and not self.is_recorded

    @property
    def explanation(self) -> str:
        """The reason, and what is exact and not as in the baseline: that is told of a ``pass`` too."""
        more = f" and {len(self.changed) - _MOST_CHANGES} more" if len(self.changed) > _MOST_CHANGES else ""
        told = f"changed since the baseline: {', '.join(self.changed[:_MOST_CHANGES])}{more}" if self.changed else ""
        reason = "recorded" if self.is_recorded else self.reason
        return "; ".join(filter(None, [reason, told, *self.circumstances]))

    @property
    def trusted(self) -> list[tuple[ExportedFigure, float]]:
        """Figures and their values, for who keeps a history: those of an ``invalid`` case are worth nothing."""
        if self.verdict == "invalid":
            return []
        return [(figure, figure.value) for figure in self.figures if figure.value is not None]

    def figure(self, metric: str) -> ExportedFigure:
        """That of this metric; without a value where the case has none."""
        absent = ExportedFigure(metric=metric, value=None)
        return next((figure for figure in self.figures if figure.metric == metric), absent)

    @classmethod
    def read(cls, result: Mapping[str, Any], machine: str = "") -> ExportedCase:
        """Of one of a document's results."""
        metrics: Mapping[str, Mapping[str, Any]] = result["metrics"]
        launches = [launch for launch in result.get("launches", []) if isinstance(launch, Mapping)]
        return cls(
            name=one_line(result["id"]) or "unnamed",
            digest=one_line(result["digest"]),
            machine=one_line(machine),
            nodeid=one_line(result["nodeid"]),
            verdict=result["verdict"],
            reason=one_line(str(result.get("reason", ""))),
            figures=tuple(_figure(name, values) for name, values in metrics.items()),
            changed=tuple(map(one_line, result.get("changed", []))),
            differences=tuple(map(one_line, result.get("differences", []))),
            circumstances=tuple(_circumstances(result, launches)),
            is_recorded=bool(result.get("updated")),
            seconds=sum(_finite(launch.get("wall_seconds")) or 0.0 for launch in launches),
            launched_at=max(filter(None, (_time(launch, "started_at") for launch in launches)), default=None),
        )

    @classmethod
    def of(cls, result: CaseResult) -> ExportedCase:
        """Of a result that is in no document yet."""
        return cls(
            name=one_line(result.id) or "unnamed",
            digest=result.digest,
            machine=one_line(result.machine),
            nodeid=one_line(result.nodeid),
            verdict=result.verdict,
            reason=one_line(result.reason),
            figures=tuple(_figure(check.metric, vars(check)) for check in result.checks),
            changed=tuple(map(one_line, result.changed)),
            differences=tuple(map(one_line, result.differences)),
            is_recorded=bool(result.updated),
        )


@dataclass(frozen=True, kw_only=True)
class ExportedRun:
    """Of one or several documents."""

    cases: tuple[ExportedCase, ...] = ()
    """The worst first."""
    troubles: tuple[str, ...] = ()
    """What fails the run and is no case's, a line each."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Cases that could not run, and why."""
    num_planned: int = 0
    unfinished: tuple[str, ...] = ()
    """Machine kinds of the documents whose run was ended before its end."""
    machines: tuple[str, ...] = ()
    """Machine kinds of all documents, in their order."""
    ended_at: float | None = None
    """When the last of them ended, seconds since 1970; of older documents when their last launch began."""
    has_failed: bool = False
    """Whether pytest said so, of a strict run perhaps for less than its verdicts tell."""

    @property
    def headline(self) -> str:
        """One line: how it went."""
        counts = Counter(case.verdict for case in self.cases)
        told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict]) or "no case"
        others = [
            f"{number} {word}" for number, word in ((len(self.skipped), "skipped"), (self.num_planned, "planned"))
        ]
        more = [other for other in others if not other.startswith("0 ")]
        return f"{'red' if self.is_red else 'green'}: {', '.join([told, *more])}"

    @property
    def is_red(self) -> bool:
        """Whether somebody has to look; pytest's own exit code counts too."""
        return self.has_failed or bool(self.troubles) or any(case.is_failing for case in self.cases)

    @classmethod
    def read(cls, documents: Sequence[Mapping[str, Any]]) -> ExportedRun:
        """Each case of each machine once: as the last of ``documents`` has it, and there by its worst verdict.

        They are what ``--perf-json`` writes: texts, lists and objects are where they belong.
        """
        found: dict[tuple[str, str, str], ExportedCase] = {}
        for document in documents:
            for case in _unique(document):
                found[case.machine, case.name, case.digest] = case
        ids = Counter((case.machine, case.name) for case in found.values())
        cases = [
            replace(case, name=f"{case.name} {case.digest[:_DIGEST_SHOWN]}")
            if ids[case.machine, case.name] > 1
            else case
            for case in found.values()
        ]
        skipped = {
            one_line(str(case["id"])): one_line(str(case["reason"]))
            for document in documents
            for case in document.get("skipped", [])
        }
        return cls(
            cases=tuple(sorted(cases, key=_badness)),
            troubles=tuple(dict.fromkeys(line for document in documents for line in _troubles(document))),
            skipped=tuple(skipped.items()),
            num_planned=sum(len(document.get("planned", [])) for document in documents),
            unfinished=tuple(dict.fromkeys(_kind(each) for each in documents if each.get("unfinished"))),
            machines=tuple(dict.fromkeys(map(_kind, documents))),
            ended_at=max(
                filter(None, [*(_time(each, "ended_at") for each in documents), *(case.launched_at for case in cases)]),
                default=None,
            ),
            has_failed=any(document.get("exit_code") for document in documents),
        )


def _unique(document: Mapping[str, Any]) -> Iterable[ExportedCase]:
    kind = _kind(document)
    unique: dict[tuple[str, str], ExportedCase] = {}
    for case in sorted((ExportedCase.read(result, kind) for result in document["results"]), key=_badness):
        unique.setdefault((case.name, case.digest), case)
    return unique.values()


def _badness(case: ExportedCase) -> tuple[int, str, str, str]:
    return VERDICTS.index(case.verdict), case.machine, case.name, case.digest


def _kind(document: Mapping[str, Any]) -> str:
    """Of a night's parts: theirs, where it is one."""
    machines = [document.get("machine"), *_values(document.get("machines"))]
    kinds = {
        one_line(str(machine["kind"])) for machine in machines if isinstance(machine, Mapping) and "kind" in machine
    }
    return kinds.pop() if len(kinds) == 1 else ""


def _values(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, Mapping) else ()


def _troubles(document: Mapping[str, Any]) -> Iterator[str]:
    if document.get("unfinished"):
        yield f"the run was ended before its end: {one_line(str(document['unfinished']))}"
    common = document.get("all_cases") or {}
    if common.get("verdict") in FAILING:
        yield one_line(str(common.get("told", "all cases")))
    if document.get("unjudged"):
        yield one_line(str(document["unjudged"]))
    yield from failed_tests(document)
    told = document.get("troubles")
    lines = [line for line in map(one_line, map(str, told if isinstance(told, list) else [])) if line]
    yield from lines
    code = document.get("exit_code")
    if code not in (None, 0, _TESTS_FAILED) and not document.get("unfinished"):
        yield f"pytest ended with exit code {code}"


def failed_tests(document: Mapping[str, Any]) -> Iterator[str]:
    """A line for each test that failed by itself: none of its cases says so. Documents of before tell of no tests."""
    said = {result["nodeid"] for result in document["results"] if ExportedCase.read(result).is_failing}
    tests = document.get("tests")
    for test in tests if isinstance(tests, list) else ():
        if isinstance(test, Mapping) and test.get("outcome") in ("failed", "error") and test.get("nodeid") not in said:
            where = "" if test.get("phase") == "call" else f" at {test.get('phase')}"
            yield one_line(f"{test.get('nodeid')}: {test['outcome']}{where}: {test.get('reason', '')}")


def _circumstances(result: Mapping[str, Any], launches: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if result["verdict"] == "pass":
        return
    yield from map(one_line, result.get("differences", [])[:_MOST_CHANGES])
    evidence = [launch.get("evidence") for launch in launches]
    nodes = {one_line(str(each.get("slurm_nodes", ""))) for each in evidence if isinstance(each, Mapping)} - {""}
    if nodes:  # the last word: what is too long is cut in its middle
        yield f"on {', '.join(sorted(nodes))}"


def _figure(metric: str, values: Mapping[str, Any]) -> ExportedFigure:
    names = ("value", "baseline", "limit", "change", "detectable", "times_slower")
    return ExportedFigure(
        metric=one_line(metric),
        unit=one_line(str(values.get("unit", ""))),
        **{name: _finite(values.get(name)) for name in names},
    )


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _time(values: Mapping[str, Any], name: str) -> float | None:
    try:
        return datetime.fromisoformat(str(values[name]).replace("Z", "+00:00")).timestamp()
    except (KeyError, ValueError, OverflowError, OSError):
        return None
