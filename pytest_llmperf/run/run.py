"""Run: what every front-end drives. It has settings and hardware, begins, checks cases, and is finished once.

pytest and ``llmperf check``, ``tune`` and ``bisect`` differ in who asks and in how the answer is shown, and in no
more. What takes time is found, and what launches and judges is loaded, on first use."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pytest_llmperf.run.findings import Coverage, Findings, Observer, UsageError, unheard
from pytest_llmperf.run.hardware import Hardware
from pytest_llmperf.run.options import Settings
from pytest_llmperf.settings.spec import Spec

if TYPE_CHECKING:
    from pytest_llmperf.judge.policy import StoredOfKind
    from pytest_llmperf.launch.prediction import StaticSteps
    from pytest_llmperf.run.case import Caller, CaseTerms
    from pytest_llmperf.run.cases import Cases
    from pytest_llmperf.run.derived_metrics import ModelFlops
    from pytest_llmperf.run.history import Revision
    from pytest_llmperf.run.measured import ResultCache
    from pytest_llmperf.run.run_end import Finished

# A launch that no time is left for is ended at once, and as any other that took too long.
_LEAST_SECONDS = 0.1


class Run(Hardware):
    """One process's run, from its first case to its files."""

    finished: Finished | None = None
    """How it ended, where anything was asked of it."""

    def __init__(self, settings: Settings, **where: Any) -> None:
        super().__init__(settings, **where)
        self.notes: list[str] = []
        self.findings = Findings()
        self.coverage = Coverage(width=settings.width.gpus if settings.width else None)
        self.has_suite = False
        """Whether cases are collected from a suite of tests, of which a baseline that none asks for is a leftover."""
        self.collected: set[str] = set()
        """Every perf test of the files that were looked at, chosen or not."""
        self.tests: dict[tuple[str, str], dict[str, str]] = {}
        """How tests ended, by node id and phase; of one that is run again its last attempt."""
        self.command = ""
        """The one that made the run; empty where it is not known."""
        self.static_versions: Mapping[str, str] = {}
        """The versions of what counted steps without a launch."""
        self.workers_bad_ends: list[str] = []
        self.idle: list[str] = []
        """Tests that passed, take ``perf`` and called nothing of it."""
        self.num_gates = 1
        self.has_floors = False
        """Whether a case may be held by its efficiency over the launches of another."""
        self.has_told_unkept = False  # that calibrations cannot be kept
        self.until = math.inf
        """By when everything has to be over, by ``time.monotonic()``: what runs then is ended."""
        self.unfinished = ""
        """What ended this run before its end."""
        self.scripts: dict[str, Spec] = {}
        """By id, those that were asked about."""
        self.ends_with = 0
        """The exit code for that, where none that the run has anyway tells enough."""

    def begin(self, specs: Iterable[Spec] = ()) -> None:
        """Imports, and what is to be known of ``specs``, run beside what comes first."""
        if self.settings.static:
            if not all(spec.is_script for spec in specs):
                self.check_interpreter()
            return
        _ = self.job  # an option may need one
        if self.settings.dry_run:
            return
        other = "" if self.settings.other_revision else self.settings.against
        self.site.prepare([sys.executable, other or sys.executable], on_cpu=self.on_cpu)
        if not self.is_worker:  # each worker has its own
            self._prepare_flops(specs)

    def check_interpreter(self) -> None:
        """Without launches this Python has what trains, or it is a ``UsageError``."""
        if not self.settings.static:
            return
        from pytest_llmperf.launch.prediction import PredictionError

        try:
            self.static_steps.check()
        except PredictionError as error:
            raise UsageError(str(error)) from None

    def cases(
        self, nodeid: str, observer: Observer, terms: CaseTerms | None = None, findings: Findings | None = None
    ) -> Cases:
        """What ``nodeid``, a test or a command, may ask for; it finds for the run unless it has ``findings``."""
        from pytest_llmperf.run.cases import Cases

        return Cases(self.caller(nodeid, observer, terms, findings))

    def caller(
        self, nodeid: str, observer: Observer, terms: CaseTerms | None = None, findings: Findings | None = None
    ) -> Caller:
        from pytest_llmperf.run.case import Caller, CaseTerms

        found = self.findings if findings is None else findings
        return Caller(run=self, terms=terms or CaseTerms(), findings=found, observer=observer, nodeid=nodeid)

    @property
    def is_concerned(self) -> bool:
        """Whether there is anything to say: a case was asked for, or a file."""
        found, asked = self.findings, self.settings
        files = asked.json or asked.report or asked.markdown
        return bool(found.results or found.planned or found.digests or self.idle or files)

    @property
    def bad_ends(self) -> list[str]:
        """A line for each launch, workers' too, that ended with an error after its record; waits for the last one."""
        return [*self.workers_bad_ends, *(self.site.bad_ends() if "site" in self.__dict__ else ())]

    def finish(self, exit_code: int, observer: Observer, *, stopped: bool = False) -> Finished | None:
        """Judge the run as a whole and write what was asked for; ``None``: there is nothing to say. ``exit_code`` is
        what its cases make of it; ``stopped``: the front-end ended it before its last case."""
        with unheard() if self.unfinished == "interrupted" else nullcontext(), closing(self):
            if self.unfinished:
                self.coverage.parts.add("the run was ended before its end")  # workers of xdist no longer tell
            if self.is_concerned:
                from pytest_llmperf.run.run_end import finish

                self.finished = finish(self, self.ends_with or exit_code, observer, stopped=stopped)
            return self.finished

    def close(self) -> None:
        for name in ("site", "static_steps", "model_flops"):
            if name in self.__dict__:
                getattr(self, name).close()

    def rerun_words(self) -> list[str]:
        """The command that runs any test of this run again, with ``TEST`` for it; empty: there are no tests."""
        return []

    def rerun_of(self, _nodes: Sequence[str]) -> str:
        """The command that runs these tests again; empty: there are no tests."""
        return ""

    def note_selection(self, recorded_by: Sequence[str]) -> None:
        """Add to ``coverage`` what options left out; these test files recorded baselines."""

    @cached_property
    def result_cache(self) -> ResultCache:
        from pytest_llmperf.run.measured import ResultCache

        return ResultCache()

    @cached_property
    def model_flops(self) -> ModelFlops:
        from pytest_llmperf.run.derived_metrics import ModelFlops

        return ModelFlops()

    def settle(self, *specs: Spec) -> None:
        """Nothing that may disturb a launch of ``specs``, or make it wait with hardware in its hands, is left to do."""
        self._prepare_flops(specs)
        self.model_flops.settle()

    def _prepare_flops(self, specs: Iterable[Spec]) -> None:
        if not self.on_cpu:
            self.model_flops.prepare(specs, self.machine.gpus[0].name)

    @cached_property
    def static_steps(self) -> StaticSteps:
        """The steps of specs as fake tensors tell them."""
        from pytest_llmperf.launch.prediction import StaticSteps

        return StaticSteps()

    @cached_property
    def stored(self) -> StoredOfKind:
        """What the baselines of this machine kind tell; read before anything of this run is recorded."""
        from pytest_llmperf.judge.policy import StoredOfKind

        knows_gpus = not self.settings.against
        return StoredOfKind(self.store, self.machine_kind, on_cpu=self.on_cpu, knows_gpus=knows_gpus)

    @property
    def judges_later(self) -> bool:
        """Whether its end judges speeds again, by what enough cases tell of their GPUs; not where it records."""
        return self.settings.update is None and self.stored.tells_later(self.num_gates)

    @cached_property
    def revision(self) -> Revision:
        """The tree's under rootdir; asked for only where something is recorded."""
        from pytest_llmperf.run.history import find_revision

        return find_revision(self.rootdir, self.settings.baselines)

    @property
    def told(self) -> list[str]:
        """Lines for a reader of the run: what was assumed of the machine, where it was asked for, and notes."""
        assumed = self._found[1] if "_found" in self.__dict__ else ""
        return [*filter(None, [assumed]), *self.notes]

    @property
    def launch_seconds(self) -> float:
        return max(_LEAST_SECONDS, min(self.settings.timeout_seconds, self.until - time.monotonic()))
