"""The plugin's entry point: every hook delegates."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import pytest

from pytest_llmperf.plugin import benchmark, header, junit_properties, reports, rootdir
from pytest_llmperf.plugin.attempts import Attempts
from pytest_llmperf.plugin.fixtures import (  # noqa: F401 - pytest finds fixtures by name in a plugin's module
    attention,
    gpus,
    liger,
    micro_batch_size,
    model,
    perf,
    precision,
    train_spec,
)
from pytest_llmperf.plugin.known_specs import expect_no_failed_launch, specs_of
from pytest_llmperf.plugin.options import run_options, width_options
from pytest_llmperf.plugin.options.width_options import is_case
from pytest_llmperf.plugin.outcomes import cause, refusal_line
from pytest_llmperf.plugin.reports import FINDINGS
from pytest_llmperf.plugin.run_end import finish, summary, trouble
from pytest_llmperf.plugin.session import SESSION, PerfSession
from pytest_llmperf.run.context import UNFINISHED
from pytest_llmperf.run.findings import Findings
from pytest_llmperf.support import signals

#: As `pytest --markers` tells them.
MARKERS = (
    "rung(number): the case is this rung of the chapter's ladder, e.g. rung(number='15.9')",
    "perf_tolerance(throughput=…, memory=…): fractions by which this test's cases may get worse",
    "perf_scaling(efficiency_at_least=…, tolerance=…): a floor of the scaling efficiency, and how far it may fall",
    "expects_oom(below_gib): the case must run out of memory on a GPU with less memory than this",
    "expects_inactive(*settings): settings that are asked for and known to change nothing, e.g. 'liger' on OPT",
    "perf_parity: what the case trains is held beside its plain form first, as by --perf-parity",
    "perf_loss_curve(seeds=5): the case's losses are held against those of so many seeds before",
    "reference(source=…, tokens_per_second_per_gpu=…, peak_reserved_gib=…): published figures of the case",
)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    config = pluginmanager.get_plugin("pytestconfig")
    run_options.refuse_unknown_update(config)
    with rootdir.guarding(parser, config):
        run_options.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    session = PerfSession(config, run_options.read_settings(config))
    config.stash[SESSION] = session
    config.add_cleanup(session.close)
    collector = _Collector(session)
    config.pluginmanager.register(collector, "llmperf-collector")
    with session.outcomes():
        if session.in_job:
            collector.mind(signals.OF_A_JOB)
        if session.settings.gpus or session.settings.launcher == "slurm":
            _ = session.machine  # fewer GPUs than asked for ends the run here, before anything is collected


class _Collector:
    """Hooks that keep what the run finds."""

    def __init__(self, session: PerfSession) -> None:
        self.session = session
        self._seen: set[str] = set()
        self._attempts = Attempts()
        self._minds: tuple[signals.Signals, ...] = ()

    def mind(self, wanted: tuple[signals.Signals, ...]) -> None:
        """Let these signals end the run as Ctrl-C does, unless others do already."""
        if not self._minds:
            self._minds = wanted
            self.session.config.add_cleanup(signals.end_on(wanted, self._ended_by))

    def _ended_by(self, name: str) -> None:
        self.session.unfinished = name
        if self.session.in_job:
            self.session.ends_with = UNFINISHED
        self.session.notes.append(f"ended by {name}: what was not told until then was not judged")

    @pytest.hookimpl(wrapper=True)
    def pytest_pycollect_makeitem(self) -> Generator[None, Any, Any]:
        """Of a test that is chosen by its parameters the others are made too, and tell nobody later."""
        made = yield
        items = made if isinstance(made, list) else [made]
        self.session.collected |= {item.nodeid for item in items if isinstance(item, pytest.Item) and is_case(item)}
        return made

    @pytest.hookimpl
    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if is_case(item):
            benchmark.prepare(item)
            self._seen.add(item.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """After -k, -m and others have chosen: what they leave is what the night is of."""
        self._seen -= width_options.select(self.session.settings.width, config, items)

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self.session.could_not_collect |= report.failed
            self.session.coverage.gaps.add(f"{report.nodeid or 'rootdir'}: collection {report.outcome}")

    @pytest.hookimpl(tryfirst=True, specname="pytest_collection_finish")
    def pytest_refuse_from_worker(self, session: pytest.Session) -> None:
        """Before the worker's own terminal, whose header nobody sees, asks for the hardware too."""
        if hasattr(session.config, "workeroutput") and any(map(is_case, session.items)):
            with self.session.outcomes():
                header.refuse_from_worker(self.session)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        # Compared, since whoever leaves items out (a plugin that shards, say) may tell nobody.
        cases = {item.nodeid for item in session.items if is_case(item)}
        left_out = len(self._seen - cases)
        self.session.coverage.nodes |= cases
        self.session.coverage.parts |= {f"{left_out} perf test(s) were left out"} if left_out else set()
        self.session.num_gates = len(cases)
        self.session.has_floors = any(item.get_closest_marker("perf_scaling") for item in session.items)
        if cases:  # to a run without any, signals mean what they always meant
            self.mind(signals.OF_A_HOST)
        if cases and not session.config.option.collectonly:
            with self.session.outcomes():
                self.session.begin(specs_of(session.items))
                if self.session.settings.static:
                    expect_no_failed_launch(session.items)
                    if not self.session.is_worker:  # each of several asks for its own when it comes to them
                        self.session.static_steps.ask(specs_of(session.items))

    @pytest.hookimpl
    def pytest_report_collectionfinish(self, items: list[pytest.Item]) -> list[str]:
        with self.session.outcomes():
            # Here, since the header tells how long it takes: pytest asks for it before collection is over for us.
            if not (self.session.is_worker or self.session.config.option.collectonly) and any(map(is_case, items)):
                from pytest_llmperf.plugin.run_progress import RunProgress

                self.session.progress = RunProgress.of(self.session, items)
            return header.header(self.session, items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A test that is run again has found nothing yet, and its launches of before are its own."""
        if self.session.progress is not None:
            self.session.progress.begin(item.nodeid)
        if item.stash.get(FINDINGS, None) is not None:
            del item.stash[FINDINGS]
            junit_properties.forget(item)
            self.session.result_cache.begin_again(item.nodeid)

    @pytest.hookimpl(wrapper=True, trylast=True, specname="pytest_runtest_makereport")
    def pytest_withhold(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Before anybody else sees the report: to all of them the test was skipped."""
        report = yield
        if FINDINGS in item.stash:
            reports.withhold(item, call, report, item.stash[FINDINGS])
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        refused = refusal_line(call.excinfo, item.path) if report.failed else None
        if refused:
            report.longrepr = refused
        findings = item.stash.get(FINDINGS, None)
        if is_case(item):
            report.llmperf_case = True  # type: ignore[attr-defined]
            findings = item.stash.setdefault(FINDINGS, Findings())
        if findings is not None:
            reports.ended(findings, call)
            crash = getattr(report.longrepr, "reprcrash", None) if report.failed else None
            if crash is not None and len(findings.results) == 1:
                crash.message = cause(crash.message, findings.results[0].id)
            if report.failed and report.when != "teardown" and not findings.results:
                with self.session.outcomes():
                    findings.results.append(reports.unjudged(self.session, item.nodeid, report.longreprtext))
            if is_case(item) and report.when == "call" and report.passed and not findings.named:
                report.llmperf_idle = True  # type: ignore[attr-defined]
            if findings.results:
                junit_properties.add(item, report, findings.results)
            # An attribute of plain data: xdist sends it to the controller with the report. A fixture may judge too.
            said = (
                "" if self.session.unfinished else reports.said(findings, report)
            )  # what ended the run says it of no test
            report.llmperf = findings.take(said)  # type: ignore[attr-defined]
        if self.session.unfinished and hasattr(item.config, "workerinput"):
            report.llmperf_unfinished = (self.session.unfinished, self.session.ends_with)  # type: ignore[attr-defined]
            item.session.shouldstop = self.session.unfinished
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """A spec that is made where a test file is imported is refused in one line too."""
        report = yield
        call = getattr(report, "call", None)
        refused = refusal_line(call.excinfo, collector.path) if call and report.failed else None
        if refused:
            report.longrepr = refused
        return report

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_rerun = str(report.outcome) == "rerun"  # of a plugin that tries again
        if not is_rerun and not hasattr(report, "llmperf_trouble") and (outcome := reports.outcome(report)):
            self.session.outcomes_of_tests[report.nodeid, str(report.when)] = outcome
        if self.session.progress is not None and report.when == "teardown":
            self.session.progress.end(report.nodeid)
        if getattr(report, "llmperf_idle", False):
            self.session.idle.append(report.nodeid)
        unfinished = getattr(report, "llmperf_unfinished", None)
        if unfinished is not None:
            self.session.unfinished, self.session.ends_with = unfinished
        if getattr(report, "llmperf_case", False):
            self.mind(signals.OF_A_HOST)  # the controller of a parallel run collects nothing itself
        values: Mapping[str, Any] | None = getattr(report, "llmperf", None)
        if values is not None:
            values = self._attempts.last_of(report, values)
            self.session.findings.add(values)
            if values["said"]:
                self.session.coverage.note(report.nodeid, values["said"])

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """A worker of xdist begins: all of them share this run's GPUs, which the controller chose."""
        with self.session.outcomes():
            self.session.charge()
            node.workerinput["llmperf_gpus"] = self.session.chosen

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A worker of xdist ended: it collected, and the controller did not."""
        output = getattr(node, "workeroutput", {})
        if header.REFUSED in output:
            raise pytest.UsageError(output[header.REFUSED])
        collected = output.get("llmperf")
        if collected is None:
            self.session.coverage.parts.add("a worker of pytest-xdist crashed")  # what it knew is lost
        else:
            self.session.coverage.add(collected)
            self.session.collected |= set(output.get("llmperf_collected", ()))

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
        return trouble.status(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        with self.session.outcomes():
            finish.finish(self.session, session)

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        with self.session.outcomes():
            summary.summarise(self.session, terminalreporter)

    @pytest.hookimpl(wrapper=True, optionalhook=True)
    def pytest_benchmark_group_stats(self, config: pytest.Config) -> Generator[None, list[Any], list[Any]]:
        groups = yield
        return benchmark.drop_from_table(config, groups, {result.nodeid for result in self.session.findings.results})
