"""A run inside a scheduler's job: what it leaves for the job's next start, and the GPU-hours that it may use."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_llmperf.launch.site import Site
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.run.journal import Journal, Kept


class Job:
    """The job of this run, through its restarts."""

    def __init__(self, folder: Path, site: Site, arguments: Sequence[str], *, resume: bool) -> None:
        self._site, self._restarts = site, site.restarts
        self.journal = Journal(folder / "jobs", site.key, arguments, resume=resume)
        self._gpus, self._start = 0, time.time()

    def charge(self) -> None:
        """Count the GPUs of the site for as long as this process runs; a job that shrinks has other processes then.

        Raises:
            SiteError: see ``Site.machine``.
        """
        self._gpus, self._start = len(self._site.machine().gpus), self._site.began()

    def budget_ends(self, gpu_hours: float | None, say: Callable[[str], None]) -> float | None:
        """When so many are used up, in seconds since the epoch; ``None``: never."""
        if gpu_hours is None or not self._gpus:
            return None
        spent, until = self._noted()
        spent += self.journal.spent_before(self._restarts)
        if math.isinf(spent):
            say(f"{self.journal.folder}/spent-*.json: no number of GPU-hours; --perf-budget is taken as used up")
        return max(until, self._start) + max(0.0, gpu_hours - spent) * 3600 / self._gpus

    def find(self, nodeid: str, digest: str) -> Kept | None:
        """What an earlier start concluded of a case, where this run goes on with that."""
        return self.journal.find(nodeid, digest)

    def keep(self, kept: Kept) -> str:
        """Write down what was concluded, and what was spent so far: a node that dies tells nothing any more."""
        self.note_spent()
        return self.journal.keep(kept)

    def begun(self, nodeid: str, digest: str) -> tuple[Launch, ...]:
        """Launches of a case that an earlier start of the job did not conclude."""
        return self.journal.begun(nodeid, digest, self._restarts)

    def begin(self, nodeid: str, digest: str, launches: Sequence[Launch]) -> None:
        """Note what a case has launched."""
        self.journal.begin(nodeid, digest, self._restarts, launches)

    def note_spent(self) -> None:
        """GPU-hours so far, idle ones too: they are what the job is charged for."""
        if self._gpus:
            (spent, until), now = self._noted(), time.time()
            if math.isinf(spent):
                return  # the note could not be read just now, or makes no sense: nothing better is known to put there
            # From where the last note ended, whoever wrote it: processes side by side count their time once.
            self.journal.note_spent(self._restarts, spent + self._gpus * max(0.0, now - until) / 3600, max(now, until))

    def _noted(self) -> tuple[float, float]:
        """GPU-hours of this start, and until when they count."""
        return self.journal.spent_in(self._restarts) or (0.0, self._start)


class NoJob(Job):
    """Of a run that nothing starts anew: it keeps nothing, and nothing is counted."""

    def __init__(self) -> None: ...

    def charge(self) -> None: ...

    def budget_ends(self, *_: object) -> None:
        return None

    def find(self, *_: object) -> None:
        return None

    def keep(self, _: Kept) -> str:
        return ""

    def begun(self, *_: object) -> tuple[Launch, ...]:
        return ()

    def begin(self, *_: object) -> None: ...

    def note_spent(self) -> None: ...
