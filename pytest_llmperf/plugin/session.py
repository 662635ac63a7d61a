"""PerfSession: one pytest process's run.

Under pytest-xdist every worker has one, and what they found reaches the controller's on the test reports."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from pytest_llmperf.plugin import items, settings_of
from pytest_llmperf.plugin.reports import did_not_train, failed
from pytest_llmperf.records.results_document import TEST
from pytest_llmperf.report.text import leaving
from pytest_llmperf.run.findings import CannotRunError, CaseFailedError, DidNotTrainError, RunEndedError, UsageError
from pytest_llmperf.run.options import Settings, table
from pytest_llmperf.run.run import Run


class PerfSession(Run):
    def __init__(self, config: pytest.Config) -> None:
        """What ``config`` was asked for; pytest.UsageError: an option that cannot be used."""
        settings = settings_of(config)
        # What it records would be held against nothing of what is there.
        if settings.update and (hidden := items.baselines_further_up(config)):
            raise pytest.UsageError(f"{hidden}; --perf-baselines=baselines begins a second one here")
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
        self.could_not_collect = False

    # The exact commands a message offers: run this case again, record it, accept it.

    def rerun(self, item: pytest.Item) -> str:
        """The command that runs this test alone, from where pytest was started; of a SLURM job, in one like it."""
        path, separator, name = item.nodeid.partition("::")
        node = os.path.relpath(self.config.rootpath / path, self.config.invocation_params.dir) + separator + name
        return shlex.join(self._words(node))

    def rerun_words(self) -> list[str]:
        """The same of any test, with ``TEST`` where its node id belongs, and in it the way to rootdir."""
        way = os.path.relpath(self.config.rootpath, self.config.invocation_params.dir)
        return self._words(TEST if way == os.curdir else os.path.join(way, TEST))  # noqa: PTH118 - as a person types it

    def _words(self, node: str) -> list[str]:
        where = ["--gpus", str(self.num_gpus)]
        if self.settings.static:
            where = ["--perf-static", *(where if self.settings.gpus is not None else [])]
        parts = ["pytest", node, *where]
        for _, option in table(Settings):
            value = getattr(self.config.option, option.dest, None)
            if option.repeated and value is not None:
                parts.append(option.flag if option.is_switch else f"{option.flag}={value}")
        for setting in self.config.getoption("override_ini", default=None) or ():
            # pytest also keeps --strict-config and the like here, which are in the ini file anyway and decide nothing.
            parts += [] if setting.startswith("strict") else ["-o", setting]
        return parts

    def rerun_of(self, nodes: Sequence[str]) -> str:
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
