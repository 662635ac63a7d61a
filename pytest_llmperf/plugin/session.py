"""PerfSession: one pytest process's run.

Under pytest-xdist every worker has one, and what they found reaches the controller's on the test reports.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from pytest_llmperf.plugin import command_line, items
from pytest_llmperf.plugin.outcomes import did_not_train, failed
from pytest_llmperf.report.text import leaving
from pytest_llmperf.run.errors import CannotRunError, CaseFailedError, DidNotTrainError, RunEndedError, UsageError
from pytest_llmperf.run.run import Run
from pytest_llmperf.run.settings import Settings

if TYPE_CHECKING:
    from pytest_llmperf.plugin.run_progress import RunProgress


class PerfSession(Run):
    """The run of one pytest process."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        worker: dict[str, list[str]] | None = getattr(config, "workerinput", None)
        words = [str(word) for word in config.invocation_params.args]
        super().__init__(
            settings,
            rootdir=config.rootpath,
            # Whether there is a plan says nothing of what was concluded.
            arguments=tuple(word for word in words if not word.startswith("--perf-plan=")),
            shared_gpus=(worker or {}).get("llmperf_gpus", ()),
            is_worker=worker is not None,
        )
        self.config, self.has_suite = config, True
        self.command = shlex.join(["pytest", *words])
        self.progress: RunProgress | None = None
        """How far it is; ``None``: it has no cases, or is a worker of others."""
        self.could_not_collect = False

    @classmethod
    def of(cls, config: pytest.Config) -> PerfSession:
        """What ``config`` was asked for.

        Raises:
            pytest.UsageError: an option that cannot be used.
        """
        settings = command_line.settings_of(config)
        if settings.update in {"new", "all"}:
            command_line.refuse_second_baselines(config)
        return cls(config, settings)

    def rerun_words(self) -> list[str]:
        from pytest_llmperf.plugin.commands import rerun_words

        return rerun_words(self, self.config)

    def rerun_of(self, nodes: Sequence[str]) -> str:
        from pytest_llmperf.records.results_document import TEST

        words = self.rerun_words()
        at = next(place for place, word in enumerate(words) if TEST in word)
        named = [words[at].replace(TEST, node) for node in nodes]
        return shlex.join([*words[:at], *named, *words[at + 1 :]])

    def note_selection(self, recorded_by: Sequence[str]) -> None:
        self.coverage.parts |= set(items.partly(self.config))
        self.coverage.gaps |= set(items.gaps(self.config, self.settings.baselines, recorded_by))

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
