"""Run: what every front-end drives. It begins, checks cases, and is finished once, whatever ended it.

pytest and ``llmperf check``, ``tune`` and ``bisect`` differ in who asks and in how the answer is shown, and in no more.
Where tests are collected this is loaded, and nothing yet of what launches and judges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_llmperf.run.context import Context

if TYPE_CHECKING:
    from pytest_llmperf.run.caller import Caller, CaseTerms
    from pytest_llmperf.run.case_check import CaseChecks
    from pytest_llmperf.run.findings import Findings
    from pytest_llmperf.run.observer import Observer
    from pytest_llmperf.run.run_end import Finished
    from pytest_llmperf.run.static_check import StaticChecks


class Run(Context):
    """One process's run, from its first case to its files."""

    finished: Finished | None = None
    """How it ended, where anything was asked of it."""

    def cases(
        self, nodeid: str, observer: Observer, terms: CaseTerms | None = None, findings: Findings | None = None
    ) -> CaseChecks | StaticChecks:
        """What ``nodeid``, a test or a command, may ask for; it finds for the run unless it has ``findings``."""
        from pytest_llmperf.run.case_check import CaseChecks
        from pytest_llmperf.run.static_check import StaticChecks

        caller = self.caller(nodeid, observer, terms, findings)
        return StaticChecks(caller) if self.settings.static else CaseChecks(caller)

    def caller(
        self, nodeid: str, observer: Observer, terms: CaseTerms | None = None, findings: Findings | None = None
    ) -> Caller:
        """Who asks."""
        from pytest_llmperf.run.caller import Caller, CaseTerms

        found = self.findings if findings is None else findings
        return Caller(context=self, terms=terms or CaseTerms(), findings=found, observer=observer, nodeid=nodeid)

    @property
    def is_concerned(self) -> bool:
        """Whether there is anything to say: a case was asked for, or a file."""
        found, asked = self.findings, self.settings
        files = asked.json or asked.report or asked.markdown or asked.update == "prune"
        return bool(found.results or found.planned or found.digests or self.idle or files)

    def finish(self, exit_code: int, observer: Observer, *, stopped: bool = False) -> Finished | None:
        """Judge the run as a whole and write what was asked for; ``None``: there is nothing to say.

        ``exit_code`` is what its cases make of it so far; ``stopped``: the front-end ended it before its last case.
        """
        try:
            if self.job is not None:
                self.job.note_spent()
            if self.unfinished:
                self.coverage.parts.add("the run was ended before its end")  # workers of xdist no longer tell
            if self.is_concerned:
                from pytest_llmperf.run.run_end import finish

                self.finished = finish(self, self.ends_with or exit_code, observer, stopped=stopped)
            return self.finished
        finally:
            self.close()
