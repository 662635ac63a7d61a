"""The command: its options, and the run that it makes of them."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pytest_llmperf.cli.answer import Answer
from pytest_llmperf.cli.arguments import add_place
from pytest_llmperf.cli.screen import Screen
from pytest_llmperf.cli.spec_arguments import named
from pytest_llmperf.cli.terminal import Terminal
from pytest_llmperf.engine.caller import Caller
from pytest_llmperf.engine.case_check import CaseChecks
from pytest_llmperf.engine.conclusion import Conclusion
from pytest_llmperf.engine.history.keeping import keep
from pytest_llmperf.engine.learning_checks import SEEDS
from pytest_llmperf.engine.static_check import StaticChecks, record_static
from pytest_llmperf.engine.terms import CaseTerms
from pytest_llmperf.engine.whole_run import WholeRun, judged_together
from pytest_llmperf.report.failure_message import failure_message
from pytest_llmperf.report.results_json import document, write_json
from pytest_llmperf.report.summary_table import summary_lines
from pytest_llmperf.run.context import Context
from pytest_llmperf.run.errors import CannotRunError, CaseFailedError, RunEndedError, UsageError
from pytest_llmperf.run.findings import Findings
from pytest_llmperf.run.revision import project_of
from pytest_llmperf.run.settings import ALL_STEPS, CALIBRATIONS, MAX_LAUNCHES, STARTS, Settings
from pytest_llmperf.run.usual_history import usual_history
from pytest_llmperf.settings.train_spec import TrainSpec
from pytest_llmperf.support import quantities
from pytest_llmperf.support.quantities import argument

#: Who asked, in results and baselines.
NODEID = "llmperf check"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those that pytest has too mean the same here."""
    add_place(parser)
    add = parser.add_argument
    add("specs", metavar="SPEC", nargs="+", help="ids of stored cases, or one spec in key=value pairs")
    add("--static", action="store_true", help="launch nothing: judge operators, arithmetic and predicted memory")
    what = "hold what each spec trains beside its plain form first: losses, gradients and updates of a small model"
    add("--perf-parity", action="store_true", help=what)
    what = "hold the losses of each spec, which has to be of a text, against those of the same seeds before"
    add("--perf-loss-curve", action="store_true", help=what)
    add("--gpus", type=argument(quantities.whole, "a number of GPUs, 0 (the CPU) or more"), metavar="N")
    add("--update-baselines", nargs="?", const="all", choices=("all", "new"), help="record what ran clean")
    add("--perf-reason", default="", metavar="TEXT", help="why, where an update makes a figure worse")
    add("--perf-json", type=Path, metavar="FILE", help="write every result, as pytest does")
    what = "the store to which this adds what its cases took, or off; default: history.sqlite of the user's state"
    add("--perf-history", metavar="FILE|off", help=what)
    add("--perf-strict", action="store_true", help="also fail on improved or inconclusive cases, and on what changed")
    number = argument(quantities.count, "a number of launches, 1 or more")
    add("--perf-launches", type=number, default=1, metavar="N", help="of each case at least; default: %(default)s")
    add("--perf-max-launches", type=number, metavar="N", help=f"of a case at most; default: {MAX_LAUNCHES}")
    seconds = argument(quantities.positive, "a time in seconds above 0")
    add("--perf-timeout", type=seconds, default=1800.0, metavar="SECONDS", help="per launch; default: %(default)s")
    add("--perf-start", choices=STARTS, default="auto", help="how a launch begins; default: %(default)s")
    add("--perf-trace", choices=("yes", "no"), default="yes", help="trace three steps after those that are timed")
    nights = argument(quantities.whole, "a number of nights, 0 or more")
    what = "a case takes all its steps once in so many nights; 1: always, 0: only when recorded; default: %(default)s"
    add("--perf-all-steps", type=nights, default=ALL_STEPS, metavar="NIGHTS", help=what)
    what = "calibrate each GPU once a day, for some seconds inside a launch; default: %(default)s"
    add("--perf-calibration", choices=CALIBRATIONS, default="auto", help=what)
    parser.set_defaults(answer=_answer, usage=parser.error)


@dataclass
class Check:
    """One run of the command."""

    arguments: argparse.Namespace
    specs: Sequence[TrainSpec]
    context: Context
    findings: Findings
    troubles: list[str]

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Check:
        """The run that was asked for; what cannot be had is refused before anything is launched.

        Raises:
            CaseError: no such spec.
        """
        specs = [one.spec for one in named(arguments.specs, arguments.perf_baselines, arguments.machine)]
        most = arguments.perf_max_launches or max(MAX_LAUNCHES, arguments.perf_launches)
        if most < arguments.perf_launches:
            arguments.usage(f"--perf-launches {arguments.perf_launches} is more than --perf-max-launches {most}")
        launching = {"--perf-loss-curve": arguments.perf_loss_curve, "--perf-parity": arguments.perf_parity}
        for name in (name for name, is_asked in launching.items() if arguments.static and is_asked):
            arguments.usage(f"--static launches nothing; it goes with no {name}")
        path = arguments.perf_json
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            arguments.usage(f"--perf-json {path}: not a file in a folder that exists")
        settings = Settings(
            gpus=arguments.gpus,
            update=arguments.update_baselines,
            reason=arguments.perf_reason.strip(),
            baselines=arguments.perf_baselines.absolute(),
            json=path,
            history=_history(arguments),
            strict=arguments.perf_strict,
            start=arguments.perf_start,
            trace=arguments.perf_trace == "yes",
            all_steps=arguments.perf_all_steps,
            calibration=arguments.perf_calibration == "auto",
            static=arguments.static,
            parity=arguments.perf_parity,
            timeout_seconds=arguments.perf_timeout,
            launches=arguments.perf_launches,
            max_launches=most,
            machine=arguments.machine or "",
        )
        context = Context(settings, rootdir=Path.cwd())
        try:
            _ = context.machine_kind
            context.begin(specs)
        except UsageError as error:
            arguments.usage(str(error))
        context.num_gates = len(specs)
        return cls(arguments, specs, context, Findings(), [])

    def lines(self, screen: Screen) -> Iterator[str]:
        """What does not hold, each as soon as it is known; then the table, as pytest's."""
        try:
            yield from self._checked(screen)
        finally:
            self.context.close()

    def _checked(self, screen: Screen) -> Iterator[str]:
        # Of specs that are named, each is meant.
        terms = CaseTerms(loss_curve=SEEDS if self.arguments.perf_loss_curve else 0)
        caller = Caller(context=self.context, terms=terms, findings=self.findings, observer=Terminal(), nodeid=NODEID)
        checks: CaseChecks | StaticChecks = CaseChecks(caller)
        if self.arguments.static:
            checks = StaticChecks(caller)
            self.context.static_steps.ask(self.specs)
        exit_code = 0
        for spec in self.specs:
            try:
                yield from self._told(spec, checks.check(spec))
            except CannotRunError as error:
                self.troubles.append(f"skipped: {error}")
            except CaseFailedError as error:
                self.troubles.append(f"{spec.id}: invalid")
                yield from str(error).splitlines()
            except RunEndedError as error:
                self.troubles.append(str(error))
                exit_code = error.exit_code
                break
        if self.context.settings.update and not self.arguments.static and not exit_code:
            yield from record_static(self.context, self.findings.results, Terminal())
        whole_run = judged_together(self.context, self.findings.results)
        self.findings.results = list(whole_run.results)
        self.troubles += whole_run.lines
        yield from filter(None, [whole_run.line])
        yield from ("", *summary_lines(self.findings.results, screen.width, color=False, spent=self.findings.spent))
        values = self._document(exit_code or int(bool(self.troubles)), whole_run)
        self._write_json(values)
        if self.context.settings.history is not None:
            yield from filter(None, [keep(self.context.settings.history, values)])
        if exit_code:
            raise SystemExit(exit_code)

    def _told(self, spec: TrainSpec, conclusion: Conclusion) -> Iterator[str]:
        if not conclusion.fails:
            if conclusion.refused:
                self.troubles.append(f"{spec.id}: {conclusion.refused}")
            return
        self.troubles.append(f"{spec.id}: {conclusion.result.verdict}")
        again = self._command(spec)
        accept = f"{again} --update-baselines" + ("=new" if conclusion.result.verdict == "new" else "")
        needs_reason = conclusion.result.verdict in ("regressed", "changed") or conclusion.result.changed
        accept += ' --perf-reason "why"' if needs_reason else ""
        offered = accept if conclusion.is_acceptable else ""
        message = failure_message(conclusion.result, again, offered, conclusion.held_against)
        yield from "\n".join(filter(None, [message, conclusion.refused])).splitlines()

    def _command(self, spec: TrainSpec) -> str:
        where = ["--static"] if self.arguments.static else ["--gpus", str(self.context.num_gpus)]
        where += ["--perf-parity"] if self.arguments.perf_parity else []
        where += ["--perf-loss-curve"] if self.arguments.perf_loss_curve else []
        words = ["llmperf", "check", *_words(spec), *where]
        return shlex.join([*words, "--perf-baselines", str(self.arguments.perf_baselines)])

    def _document(self, exit_code: int, whole_run: WholeRun) -> dict[str, Any]:
        values = document(self.context.machine_document(), self.findings.results, self.findings.spent)
        launched = any(result.launches for result in self.findings.results)
        revision = self.context.revision.document() | {"project": project_of(self.context.rootdir)} if launched else {}
        return values | revision | whole_run.document() | {"exit_code": exit_code}

    def _write_json(self, values: Mapping[str, Any]) -> None:
        path = self.context.settings.json
        if path is None:
            return
        try:
            write_json(path, values)
        except OSError as error:
            self.troubles.append(f"--perf-json {path}: not written ({error})")


def _history(arguments: argparse.Namespace) -> Path | None:
    said = arguments.perf_history
    if said == "off":
        return None
    path = usual_history() if said is None else Path(said)
    if said is not None and (path.is_dir() or not path.parent.is_dir()):
        arguments.usage(f"--perf-history {path}: not a file in a folder that exists; or off, which keeps no history")
    return path


def _words(spec: TrainSpec) -> Sequence[str]:
    """What names ``spec`` on a command line: only what is not as it is anyway."""
    usual = {field.name: field.default for field in fields(TrainSpec)}
    values = {name: value for name, value in spec.to_dict().items() if name == "model" or value != usual.get(name)}
    return [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in values.items()]


def _answer(arguments: argparse.Namespace, screen: Screen) -> Answer:
    check = Check.of(arguments)
    return Answer(check.lines(screen), check.troubles, acts=True)
