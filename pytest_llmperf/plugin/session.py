"""PerfSession: one pytest process's run, and what it has found so far.

Under pytest-xdist every worker has one, and what they found reaches the controller's on the test reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from pytest_llmperf.plugin.outcomes import did_not_train, failed
from pytest_llmperf.report.text import leaving
from pytest_llmperf.run.context import Context
from pytest_llmperf.run.coverage import Coverage
from pytest_llmperf.run.errors import CannotRunError, CaseFailedError, DidNotTrainError, RunEndedError, UsageError
from pytest_llmperf.run.findings import Findings
from pytest_llmperf.run.settings import Settings

if TYPE_CHECKING:
    from pytest_llmperf.engine.whole_run import WholeRun
    from pytest_llmperf.plugin.run_progress import RunProgress


class PerfSession(Context):
    """The run of one pytest process."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        worker: dict[str, list[str]] | None = getattr(config, "workerinput", None)
        words = map(str, config.invocation_params.args)
        super().__init__(
            settings,
            rootdir=config.rootpath,
            # Whether there is a plan says nothing of what was concluded.
            arguments=tuple(word for word in words if not word.startswith("--perf-plan=")),
            shared_gpus=(worker or {}).get("llmperf_gpus", ()),
            is_worker=worker is not None,
        )
        self.config = config
        self.findings = Findings()
        self.outcomes_of_tests: dict[tuple[str, str], dict[str, str]] = {}
        """By node id and phase; of a test that is run again its last attempt's."""
        self.whole_run: WholeRun | None = None
        """What its cases say of each other, once it is over."""
        self.progress: RunProgress | None = None
        """How far it is; ``None``: it has no cases, or is a worker of others."""
        self.could_not_collect = False
        self.collected: set[str] = set()
        """Every perf test of the files that were looked at, chosen or not."""
        self.idle: list[str] = []
        """Tests that passed, take ``perf`` and called nothing of it."""
        self.coverage = Coverage(width=settings.width.gpus if settings.width else None)

    @contextmanager
    def outcomes(self) -> Iterator[None]:
        """Pytest's own outcomes and errors, for what a run's parts raise."""
        try:
            yield
        except UsageError as error:
            raise pytest.UsageError(leaving(str(error))) from None
        except CannotRunError as error:
            pytest.skip(leaving(str(error)))
        except DidNotTrainError as error:
            raise did_not_train(str(error)) from None
        except CaseFailedError as error:
            raise failed(str(error)) from None
        except RunEndedError as error:
            if self.is_worker:
                pytest.skip(str(error))  # the controller of a parallel run would take an exit for a crash
            pytest.exit(leaving(str(error)), returncode=error.exit_code)


SESSION = pytest.StashKey[PerfSession]()
