"""PerfSession, the run of one pytest process, and the hooks that keep what it finds, and end it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from signal import Signals
from typing import Any, TypeAlias

import pytest

from pytest_llmperf.plugin import is_case, items, reports, settings_of
from pytest_llmperf.plugin.items import expect_no_failed_launch, header, select, specs_of, trains_by_recipe
from pytest_llmperf.records.results_document import TEST
from pytest_llmperf.report.text import leaving, one_line
from pytest_llmperf.run.findings import (
    UNFINISHED,
    CannotRunError,
    CaseFailedError,
    DidNotTrainError,
    Findings,
    RunEndedError,
    UsageError,
)
from pytest_llmperf.run.options import Settings, table
from pytest_llmperf.run.run import Run
from pytest_llmperf.support import interpreter

_Reporting: TypeAlias = Generator[None, pytest.TestReport, pytest.TestReport]

# Under which a worker of xdist leaves its controller the line of a usage error.
_REFUSED = "llmperf_refused"


class PerfSession(Run):
    """A run. Under pytest-xdist each worker has one, and test reports bring the controller what it found."""

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
        on = ["--gpus", str(self.num_gpus)] if self.settings.gpus is not None or not self.settings.static else []
        parts = ["pytest", node, *["--perf-static"] * self.settings.static, *on]
        for _, option in table(Settings):
            value = getattr(self.config.option, option.dest, None)
            if option.repeated and value is not None:
                parts.append(option.flag if option.is_switch else f"{option.flag}={value}")
        given = self.config.getoption("override_ini", default=None) or ()
        # pytest also keeps --strict-config and the like here, which are in the ini file anyway and decide nothing.
        return [*parts, *(word for one in given if not one.startswith("strict") for word in ("-o", one))]

    def rerun_of(self, nodes: Sequence[str]) -> str:
        words = self.rerun_words()
        at = next(place for place, word in enumerate(words) if TEST in word)
        return shlex.join([*words[:at], *[words[at].replace(TEST, node) for node in nodes], *words[at + 1 :]])

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
            raise reports.DidNotTrain(leaving(str(error)), pytrace=False) from None
        except CaseFailedError as error:
            raise reports.failed(str(error)) from None
        except RunEndedError as error:
            if self.is_worker:
                pytest.skip(str(error))  # the controller of a parallel run would take an exit for a crash
            pytest.exit(leaving(str(error)), returncode=error.exit_code)


class Collector:
    def __init__(self, config: pytest.Config) -> None:
        """Begin the run; pytest.UsageError: an option that cannot be used, or hardware that is not there."""
        self.session = session = PerfSession(config)
        self._seen, self._attempts = set[str](), dict[str, list[str]]()
        self._minds_signals, self._failed_with = False, 0
        config.add_cleanup(session.close)
        config.pluginmanager.register(self, "llmperf-collector")
        with session.outcomes():
            if session.in_job:
                self.mind(interpreter.OF_A_JOB)
            if session.settings.gpus or session.settings.launcher == "slurm":
                _ = session.machine  # fewer GPUs than asked for ends the run here, before anything is collected

    def mind(self, wanted: tuple[Signals, ...]) -> None:
        """Let these signals end the run as Ctrl-C does, unless others do already."""
        run = self.session

        def ended_by(name: str) -> None:
            run.unfinished, run.ends_with = name, UNFINISHED if run.in_job else run.ends_with
            run.notes.append(f"ended by {name}: what was not told until then was not judged")

        if not self._minds_signals:
            self._minds_signals = True
            run.config.add_cleanup(interpreter.end_on(wanted, ended_by))

    def saw(self, made: Iterable[Any]) -> None:
        """Of a test that is chosen by its parameters the others are made too, and nothing shows them later."""
        self.session.collected |= {item.nodeid for item in made if isinstance(item, pytest.Item) and is_case(item)}

    @pytest.hookimpl(wrapper=True)
    def pytest_pycollect_makeitem(self) -> Generator[None, Any, Any]:
        made = yield
        self.saw(made if isinstance(made, list) else [made])
        return made

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if is_case(item):
            reports.prepare_benchmark(item)
            self._seen.add(item.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """After -k, -m and others have chosen: what they leave is what the night is of."""
        self._seen -= select(self.session.settings.width, config, items)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self.session.could_not_collect |= report.failed
            self.session.tests[report.nodeid, "collect"] = reports.outcome(report)
            self.session.coverage.gaps.add(f"{report.nodeid or 'rootdir'}: collection {report.outcome}")

    @pytest.hookimpl(tryfirst=True, specname="pytest_collection_finish")
    def pytest_refuse_from_worker(self, session: pytest.Session) -> None:
        """Ask for the hardware before the worker's own terminal does, where a usage error would be a crash."""
        if hasattr(session.config, "workeroutput") and any(map(is_case, session.items)):
            with self.session.outcomes():
                try:
                    _ = self.session.machine_kind
                    if trains_by_recipe(session.items):
                        self.session.check_interpreter()
                except UsageError as error:
                    session.config.workeroutput[_REFUSED] = str(error)
                    raise

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        # Compared, since whoever leaves items out (a plugin that shards, say) may say nothing.
        cases = {item.nodeid for item in session.items if is_case(item)}
        left_out, run = len(self._seen - cases), self.session
        run.coverage.nodes |= cases
        run.coverage.parts |= {f"{left_out} perf test(s) were left out"} if left_out else set()
        run.num_gates = len(cases)
        run.has_floors = any(item.get_closest_marker("perf_scaling") for item in session.items)
        if cases:  # to a run without any, signals mean what they always meant
            self.mind(interpreter.OF_A_HOST)
        if cases and not session.config.option.collectonly:
            with run.outcomes():
                if trains_by_recipe(session.items):
                    run.check_interpreter()
                run.begin(specs_of(session.items))
                if run.settings.static:
                    expect_no_failed_launch(session.items)
                    if not run.is_worker:  # each of several asks for its own when it comes to them
                        run.static_steps.ask(specs_of(session.items))

    def pytest_report_collectionfinish(self, items: list[pytest.Item]) -> list[str]:
        with self.session.outcomes():
            return header(self.session, items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A test that is run again has found nothing yet, and its launches of before are its own."""
        if item.stash.get(reports.FINDINGS, None) is not None:
            from pytest_llmperf.report.exports import PREFIX

            del item.stash[reports.FINDINGS]
            item.user_properties[:] = [each for each in item.user_properties if not each[0].startswith(PREFIX)]
            self.session.result_cache.begin_again(item.nodeid)

    @pytest.hookimpl(wrapper=True, trylast=True, specname="pytest_runtest_makereport")
    def pytest_withhold(self, item: pytest.Item, call: pytest.CallInfo[None]) -> _Reporting:
        """Before anybody else sees the report: to all of them the test was skipped, and told no secret."""
        report = yield
        if reports.FINDINGS in item.stash:
            reports.withhold(item, call, report, item.stash[reports.FINDINGS])
        if is_case(item):
            reports.redact(report)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> _Reporting:
        report = yield
        if is_case(item):
            report.llmperf_case = True  # type: ignore[attr-defined]
            item.stash.setdefault(reports.FINDINGS, Findings())
        if (findings := item.stash.get(reports.FINDINGS, None)) is not None:
            with self.session.outcomes():
                reports.attach(self.session, item, call, report, findings)
        if self.session.unfinished and hasattr(item.config, "workerinput"):
            report.llmperf_unfinished = (self.session.unfinished, self.session.ends_with)  # type: ignore[attr-defined]
            item.session.shouldstop = self.session.unfinished
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        run = self.session
        is_rerun = str(report.outcome) == "rerun"  # of a plugin that tries again
        if not is_rerun and not hasattr(report, "llmperf_trouble") and (outcome := reports.outcome(report)):
            # Those of subtests, whose test may be said to pass, are of the same phase.
            before = run.tests.get((report.nodeid, str(report.when)), {})
            run.tests[report.nodeid, str(report.when)] = before if before.get("outcome") == "failed" else outcome
        if getattr(report, "llmperf_idle", False):
            run.idle.append(report.nodeid)
        run.unfinished, run.ends_with = getattr(report, "llmperf_unfinished", (run.unfinished, run.ends_with))
        if getattr(report, "llmperf_case", False):
            self.mind(interpreter.OF_A_HOST)  # the controller of a parallel run collects nothing itself
        values: Mapping[str, Any] | None = getattr(report, "llmperf", None)
        if values is not None:
            values = reports.last_attempt(self._attempts, report, values)
            run.findings.add(values)
            if values["said"]:
                run.coverage.note(report.nodeid, values["said"])

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """A worker of xdist begins: all of them share this run's GPUs, which the controller chose."""
        with self.session.outcomes():
            node.workerinput["llmperf_gpus"] = chosen = self.session.chosen
            workers, n = node.workerinput["workercount"], len(chosen)
            if 0 < n < workers and node.workerinput["workerid"] == "gw0":
                note = f"-n {workers} with --gpus {n}: {n} at a time; a larger --gpus lets more of them launch"
                self.session.notes.append(note)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of xdist ended: it collected, and the controller did not."""
        output = getattr(node, "workeroutput", {})
        if _REFUSED in output:
            raise pytest.UsageError(output[_REFUSED])
        if "llmperf" not in output:
            self.session.coverage.parts.add("a worker of pytest-xdist crashed")  # what it knew is lost
        elif output["llmperf"] is not None:
            self.session.coverage.add(output["llmperf"])
            self.session.collected |= set(output.get("llmperf_collected", ()))
            self.session.workers_bad_ends += output.get("llmperf_bad_ends", ())

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
        """How a trouble counts: as an error, and by no letter where it is reported, after which 200 % would stand."""
        word = getattr(report, "llmperf_trouble", None)
        return None if word is None else ("error", "", word)

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Ctrl-C, or pytest.exit with any exit code: noted before it is shown, which a second Ctrl-C may end."""
        run, is_exit = self.session, isinstance(excinfo.value, pytest.exit.Exception)
        if run.could_not_collect and not is_exit:  # pytest ends so too, and says it itself
            run.coverage.parts.add("the run was ended before its end")
        else:
            why = f"pytest.exit: {one_line(str(excinfo.value))}" if is_exit else "interrupted"
            run.unfinished = run.unfinished or why

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        run, config = self.session, session.config
        if hasattr(config, "workeroutput"):
            config.workeroutput["llmperf"] = run.coverage.to_dict()
            config.workeroutput["llmperf_collected"] = sorted(run.collected)
            config.workeroutput["llmperf_bad_ends"] = run.bad_ends
            return
        if run.unfinished == "interrupted":  # by two Ctrl-C pytest has no code of its own yet
            session.exitstatus = pytest.ExitCode.INTERRUPTED
        from pytest_llmperf.plugin.console import Console

        stopped = bool(session.shouldstop or session.shouldfail)
        with run.outcomes():
            finished = run.finish(int(session.exitstatus), Console(config), stopped=stopped)
        session.exitstatus = finished.exit_code if finished else run.ends_with or session.exitstatus
        self._failed_with = 0 if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED else int(session.exitstatus)
        for trouble in finished.troubles if finished else ():
            reports.tell(config, trouble)

    @pytest.hookimpl(wrapper=True, specname="pytest_sessionfinish")
    def pytest_keep_exit_code(self, session: pytest.Session) -> Generator[None, None, None]:
        """Others (syrupy) add bits of the code of before to ours, which makes another code of it."""
        yield
        if self._failed_with:
            session.exitstatus = self._failed_with

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.session.is_concerned:
            return
        from pytest_llmperf.plugin.console import summarise

        with self.session.outcomes():
            summarise(self.session, terminalreporter)

    @pytest.hookimpl(wrapper=True, optionalhook=True)
    def pytest_benchmark_group_stats(self, config: pytest.Config) -> Generator[None, list[Any], list[Any]]:
        groups = yield
        return reports.drop_from_benchmark_table(config, groups, {one.nodeid for one in self.session.findings.results})
