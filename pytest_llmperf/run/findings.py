"""Findings: what one test found and what ended it, what a run saw of its suite, and who sees launches meanwhile.

What ends a case or a run without a conclusion is one line for people: the plugin makes pytest's outcomes of it, the
command line its exit codes."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from pytest_llmperf.records.failure import Progress
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.result import CaseResult, Spent
from pytest_llmperf.records.results_document import Planned, ResultsDocument, Skipped
from pytest_llmperf.report.failure_message import failure_message
from pytest_llmperf.run.options import UsageError as UsageError  # noqa: PLC0414 - found beside the other errors
from pytest_llmperf.support import codec
from pytest_llmperf.support.formats import first_n


@contextmanager
def unheard() -> Iterator[None]:
    """No Ctrl-C ends what the main thread does here: it is the second one, and what was found is written first."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@codec.sparse("held_against", "refused")
@dataclass(frozen=True, kw_only=True)
class Concluded:
    result: CaseResult
    held_against: str = "none"
    """For people: how much of a baseline, or what took turns with it."""
    refused: str = ""
    """Why it was not recorded, where the run asked for that."""
    fails: bool = False
    """Whether the case does not hold, and was not recorded either; told anew by each run, so that no file has it."""
    is_acceptable: bool = True
    """Whether its figures are of the kind that baselines keep."""

    def message(self, again: str) -> str:
        """Why it fails, with the commands to run it ``again`` and to accept it; a loss or a refusal needs a reason."""
        result, accept = self.result, ""
        if self.is_acceptable:
            accept = f"{again} --update-baselines" + ("=new" if result.verdict == "new" else "")
            needs_reason = result.verdict in ("regressed", "changed") or result.changed or self.refused
            accept += ' --perf-reason "why"' if needs_reason else ""
        told = failure_message(result, rerun=again, accept=accept, baseline=self.held_against)
        return "\n".join(filter(None, [told, self.refused if self.refused != result.reason else ""]))


_KINDS: Mapping[str, type] = {"results": CaseResult, "planned": Planned, "skipped": Skipped}


@dataclass
class Findings:
    """The findings of one test; they travel on its report."""

    results: list[CaseResult] = field(default_factory=list)
    planned: list[Planned] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    """Those of every spec it asked about, also where it was skipped: their baselines are in use."""
    named: bool = False
    """Whether it ever asked about one."""
    begun: bool = False
    """Whether one of them was looked at: what a run of one width has first decides where the test belongs."""
    withheld: str = ""
    """Why nothing was launched for what it asked about, where it went on without."""
    stopped: bool = False
    """Whether it was ended at a spec that cannot run here."""
    cut: bool = False
    """Whether it ended by itself before its end: nobody knows what else it would have asked about."""
    spent: Spent = field(default_factory=Spent)
    told: bool = False
    """Whether a result was sent away already: subtests have reports of their own."""

    def spend(self, **what: Any) -> None:
        self.spent += Spent(**what)

    def take(self, said: str = "") -> dict[str, Any] | None:
        """What was found since the last time, to be sent away; ``None`` where nothing was."""
        if not (self.results or self.planned or self.skipped or self.digests or said or self.spent.phases):
            return None
        values = {name: codec.plain(getattr(self, name)) for name in (*_KINDS, "digests", "spent")} | {"said": said}
        self.told |= bool(self.results)
        self.results, self.planned, self.skipped, self.digests, self.spent = [], [], [], [], Spent()
        return values

    def add(self, values: Mapping[str, Any]) -> None:
        for name, kind in _KINDS.items():
            getattr(self, name).extend(codec.read(kind, each) for each in values[name])
        self.digests += values["digests"]
        self.spent += codec.read(Spent, values["spent"])


class LaunchObserver(Protocol):
    """Sees one launch: how far it is, the record that it leaves, and that nothing more is shown of it."""

    def update(self, progress: Progress) -> None: ...

    def finished(self, launch: Launch) -> None: ...

    def clear(self) -> None: ...


class Observer(Protocol):
    """Sees the launches of one case."""

    def say(self, line: str) -> None:
        """A line about what happens, or about why nothing seems to."""

    def launch(self, spec_id: str, number: int, launches: int) -> AbstractContextManager[LaunchObserver]:
        """One launch begins."""

    def ended_from_outside(self, error: BaseException) -> str:
        """Why somebody else ended what was waited for, a test's time limit say; empty of an error of our own."""


class CannotRunError(Exception):
    """This case cannot run here: hardware or a package that it needs is not there."""


class CaseFailedError(Exception):
    """The case fails, and its message is all there is to say."""


class DidNotTrainError(CaseFailedError):
    """The same where a launch ended without a record; ``may_train_again``: another run may end otherwise."""

    def __init__(self, message: str, *, may_train_again: bool = False) -> None:
        super().__init__(message)
        self.may_train_again = may_train_again


#: The run ended early and can go on: time limit, preemption, scancel, a lost node. Shells take 75 for "try again".
UNFINISHED = 75


class RunEndedError(Exception):
    """The run ends before its end: what is known is written, and nothing more is launched."""

    def __init__(self, why: str, exit_code: int) -> None:
        super().__init__(why)
        self.exit_code = exit_code


#: How much a test said of what it runs: every spec; those up to one that cannot run here; some, and then it ended.
ALL, STOPPED, SOME = "all", "stopped", "some"
_SAID = (SOME, STOPPED, ALL)

_MOST_NODES = 3

_SETS = ("nodes", "parts", "gaps")


@dataclass
class Coverage:
    """As much of its suite as a run saw."""

    nodes: set[str] = field(default_factory=set)
    """Perf tests that were to run."""
    said: dict[str, str] = field(default_factory=dict)
    """By node, of those that ended."""
    parts: set[str] = field(default_factory=set)
    """Why tests of a file that ran may be missing."""
    gaps: set[str] = field(default_factory=set)
    """Why whole files may be missing."""
    width: int | None = None
    """Only tests of so many GPUs were to run: who knows the other widths too can tell what no test asks for."""

    def note(self, node: str, said: str) -> None:
        self.nodes.add(node)  # also one that got ``perf`` only while it ran
        self.say(node, said)

    def say(self, node: str, said: str) -> None:
        """Of a test that ran more than once, at several widths say, the most counts."""
        self.said[node] = max(self.said.get(node, SOME), said, key=_SAID.index)

    def to_dict(self) -> dict[str, Any]:
        return {name: sorted(getattr(self, name)) for name in _SETS} | {"said": self.said}

    def add(self, values: Mapping[str, Any]) -> None:
        for name in _SETS:
            getattr(self, name).update(values[name])
        for node, said in values["said"].items():
            self.say(node, said)

    def files(self) -> set[str]:
        """Test files of which every perf test ran and said what it runs, as far as it can run here."""
        unsure = {file_of(node) for node in self.nodes if self.said.get(node, SOME) == SOME}
        return set() if self.parts or self.width else {file_of(node) for node in self.nodes} - unsure

    def doubts(self) -> str:
        """Why a baseline that nobody asked for may be in use all the same, and what to do; empty where it cannot be."""
        if self.parts:
            return f"only some tests were selected ({'; '.join(sorted(self.parts))}); run the whole suite"
        if self.width:
            return f"only tests of {self.width} GPU(s) were selected (--perf-width); llmperf merge knows all widths"
        if self.gaps:
            return f"only a part of the suite may have been collected ({'; '.join(sorted(self.gaps))})"
        if not self.nodes:
            return "no perf test was collected; run the whole suite"
        unsure = sorted(node for node in self.nodes if self.said.get(node) != ALL)
        return f"not every perf test said all that it runs: {first_n(unsure, _MOST_NODES)}" if unsure else ""


def is_whole(plan: ResultsDocument) -> bool:
    """Whether a dry run's ``--perf-json`` is of a run that asked every test."""
    if plan.suite is None or plan.suite.stopped or plan.unfinished:
        return False
    return {*plan.suite.coverage.nodes} <= {*plan.suite.coverage.said}


def file_of(node: str) -> str:
    """The file of a node id, relative to rootdir."""
    return node.partition("::")[0]


@dataclass(frozen=True, kw_only=True)
class Width:
    """The number of GPUs, or of ranks on the CPU, whose tests are to run."""

    gpus: int
    plan: Mapping[str, int] | None = None
    """By node id, the widest spec that a test asks for; ``None``: nobody has asked them."""
    is_whole: bool = True
    """Whether every test was asked."""

    def selects(self, nodeid: str, *, is_case: bool) -> bool:
        """Whether a test may be of this width; one that asked for nothing, and has no ``perf``, is of none."""
        if self.plan is not None and nodeid in self.plan:
            return self.plan[nodeid] == self.gpus
        return is_case or self.plan is None or not self.is_whole

    def knows(self, nodeid: str) -> bool:
        return self.plan is not None and nodeid in self.plan
