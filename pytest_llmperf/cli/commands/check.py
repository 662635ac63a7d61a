"""``llmperf check``: its options, and the run that it makes of them."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from signal import Signals

from pytest_llmperf.cli.answer import Answer, Screen, add_shared
from pytest_llmperf.cli.asked_run import Terminal, as_pairs, asked_run, named, usage_errors
from pytest_llmperf.report.summary_table import summary_lines
from pytest_llmperf.run.findings import CannotRunError, CaseFailedError, Concluded, RunEndedError
from pytest_llmperf.run.run import Run
from pytest_llmperf.settings.spec import Spec


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("specs", metavar="SPEC", nargs="*")
    parser.add_argument("--script", metavar="COMMAND")
    add_shared(parser, "check")
    parser.set_defaults(answer=_answer)


@dataclass
class Check:
    arguments: argparse.Namespace
    specs: Sequence[Spec]
    run: Run
    troubles: list[str] = field(default_factory=list)
    exit_code: int = 0
    """Why the run ended early, where it did."""

    def lines(self, screen: Screen) -> Iterator[str]:
        """What does not hold, each as soon as it is known; then the table, as pytest's, of what was found so far."""
        try:
            yield from self._checked()
        except KeyboardInterrupt as error:
            self.run.unfinished = str(error) or "interrupted"
            self.exit_code = 128 + Signals[str(error) or "SIGINT"]
            yield from self._finished(screen)
            raise
        except BaseException as error:  # a fault, or whoever prints these lines was interrupted
            self.run.unfinished = "interrupted" if isinstance(error, GeneratorExit) else type(error).__name__
            self._finished(screen)
            raise
        yield from self._finished(screen)
        if self.exit_code:
            raise SystemExit(self.exit_code)

    def _checked(self) -> Iterator[str]:
        checks = self.run.cases("llmperf check", Terminal())
        if self.run.settings.static:
            self.run.static_steps.ask(self.specs)
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
                self.run.unfinished, self.exit_code = str(error), error.exit_code
                return

    def _finished(self, screen: Screen) -> list[str]:
        run = self.run
        finished = run.finish(self.exit_code or int(bool(self.troubles)), Terminal())
        self.troubles += [line for trouble in finished.troubles for line in trouble.lines] if finished else []
        common = finished.whole_run.line if finished else ""
        table = summary_lines(run.findings.results, screen.width, color=False, spent=run.findings.spent)
        return [*filter(None, [common]), "", *table, *run.told]

    def _told(self, spec: Spec, conclusion: Concluded) -> Iterator[str]:
        if conclusion.refused and not conclusion.fails:
            self.troubles.append(f"{spec.id}: {conclusion.refused}")
        if not conclusion.fails:
            return
        self.troubles.append(f"{spec.id}: {conclusion.result.verdict}")
        settings = self.run.settings
        where = ["--static"] if settings.static else ["--gpus", str(self.run.num_gpus)]
        where += ["--perf-parity"] if settings.parity else []
        where += [f"--perf-soak={settings.soak_minutes:g}"] if settings.soak_minutes else []
        again = ["llmperf", "check", *as_pairs(spec), *where, "--perf-baselines", str(self.arguments.perf_baselines)]
        yield from conclusion.message(shlex.join(again)).splitlines()


def _answer(arguments: argparse.Namespace, screen: Screen) -> Answer:
    found = named(arguments.specs, arguments.perf_baselines, arguments.machine, arguments.script)
    specs = [one.spec for one in found]
    run = asked_run(arguments)
    with usage_errors(arguments):
        run.begin(specs)
    run.num_gates = len(specs)
    check = Check(arguments, specs, run)
    return Answer(check.lines(screen), check.troubles, acts=True)
