"""`llmperf merge`: the --perf-json files of one night as one document, and as a page for people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pytest_llmperf.cli.night_tests import LeftOut, Tests, ended, silent, skipped, some_of, unjudged
from pytest_llmperf.records.result import FAILING, VERDICTS, verdict_fails
from pytest_llmperf.records.results_document import SCHEMA, Result, ResultsError, ResultsFile
from pytest_llmperf.report.exports import ExportedCase, case_table, counted, failed_tests, tests_of
from pytest_llmperf.report.summary_table import merged_reasons
from pytest_llmperf.report.text import escaped
from pytest_llmperf.run.findings import is_whole
from pytest_llmperf.run.leftovers import unused_of_night
from pytest_llmperf.support import formats, grouped
from pytest_llmperf.support.files import text_of

# pytest's own exit codes; of those that failed the cases tell.
_TESTS_FAILED, _NO_TESTS = 1, 5
# What ended a run, as SLURM sends it: the nightly script asks for USR1 before the time limit.
_ENDED_BY = {"SIGUSR1": "the time limit was near", "SIGTERM": "ended from outside: scancel or preemption"}
# As the run says it, several nodes with commas between, and as SLURM does where it gives a node up.
_FAILED = re.compile(r"\bnode ((?:[\w.-]+, )*[\w.-]+)(?: and \d+ more)? failed|\bNode failure on ([\w.-]+)")


@dataclass(frozen=True)
class Night:
    parts: tuple[ResultsFile, ...]
    troubles: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Worth a line, and no reason to be red."""
    judged: str = ""
    """Which revision, and in which job."""

    @property
    def results(self) -> list[tuple[Result, Mapping[str, Any], str]]:
        """Every case once, by its worst verdict; the worst first. Each as its file has it too, and of which of many."""
        found = list[tuple[Result, Mapping[str, Any], Path]]()
        for part in self.parts:
            both = zip(part.document.results, part.values["results"], strict=True)
            found += [(*each, part.path) for each in both]
        ordered = sorted(found, key=lambda each: (VERDICTS.index(each[0].verdict), each[0].id))
        alike = grouped(((one[0].nodeid, one[0].digest), one) for one in ordered)
        worst = ((*one, f"the worst of {len(more) + 1} runs, in " if more else "") for one, *more in alike.values())
        return [(result, values, of and f"{of}{path}") for result, values, path, of in worst]

    @property
    def cases(self) -> list[ExportedCase]:
        """``results`` with how their tests ended; with the test where several have checked one case."""
        tests = {nodeid: test for part in self.parts for nodeid, test in tests_of(part.document).items()}
        cases = [replace(ExportedCase.of(result, tests=tests), of_runs=of) for result, _, of in self.results]
        names = Counter(case.name for case in cases)
        shown = [f"{case.name} ({case.result.nodeid})" if names[case.name] > 1 else case.name for case in cases]
        return [replace(case, name=name) for case, name in zip(cases, shown, strict=True)]

    @property
    def headline(self) -> str:
        return f"{'red' if self.troubles else 'green'}: {counted(self.cases)}"

    def document(self) -> dict[str, Any]:
        """As one run's --perf-json, with the parts' machines side by side."""
        machines: dict[str, Any] = {part.path.name: part.values.get("machine", {}) for part in self.parts}
        # Of a run, and of GPUs, of its own: so by file.
        together = {part.path.name: part.document.all_cases for part in self.parts if part.document.all_cases}
        first: dict[str, Any] = next(iter(machines.values()), {})
        return {
            "schema": SCHEMA,
            "machine": first if all(each == first for each in machines.values()) else {},
            "machines": machines,
            "troubles": list(self.troubles),
            **({"all_cases": together} if together else {}),
            "results": [values for _, values, _ in self.results],
            "tests": [test for part in self.parts for test in part.values.get("tests", [])],
            "ended_at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    def page(self) -> list[str]:
        """Markdown: the headline, what is missing, and a line for each case."""
        lines = [f"# {self.headline}", "", *([escaped(self.judged), ""] if self.judged else [])]
        lines += [f"- {escaped(line)}" for line in (*self.troubles, *self.notes)]
        lines += [""] if self.troubles or self.notes else []
        return lines + case_table(self.cases)


def gather(named: Sequence[Path], expected: Sequence[str], without: LeftOut | None = None) -> Night:
    """What the files named and those of folders say, and what is wrong. Widths left out are noted, not missed."""
    paths = [path for one in named for path in (sorted(one.glob("gpus-*.json")) if one.is_dir() else [one])]
    folders = [one for one in named if one.is_dir()]
    parts, troubles = _read(paths)
    plans, broken = _read(path for folder in folders for path in sorted(folder.glob("plan*.json")))
    documents = [part.document for part in (*parts, *plans)]
    suites = [document.suite for document in documents if document.suite]
    tests = Tests.of([part.document for part in parts], [plan.document for plan in plans])
    missing = [name for name in expected if not any((folder / name).exists() for folder in folders)]
    for name in missing:
        how = next(filter(None, (ended(folder / name) for folder in folders)), None)
        why = how.told if how else f"look at its log in {', '.join(map(str, folders))}"
        broken.append(f"{name}: missing, its job wrote no results; {why}{_left(_width_of(name), tests)}")
    troubles += broken
    if not parts and not troubles:
        troubles.append(f"no gpus-*.json in {', '.join(map(str, named))}; name a results folder or --perf-json files")
    troubles += filter(None, (_trouble(part, tests) for part in parts))
    troubles += [f"{part.path.name}: {line}" for part in parts for line in failed_tests(part.document)]
    failing, noted = _of_whole_runs(parts)
    reported = [*(_width(part) for part in parts if part.document.unfinished), *map(_width_of, missing)]
    widths = {*filter(None, [*map(_width, parts), *map(_width_of, expected)])}
    missed, meant = unjudged(tests, widths, {*filter(None, reported)}, without or LeftOut())
    troubles += [*failing, *missed]
    left, doubts = unused_of_night(documents)
    is_strict = any(suite.strict for suite in suites)  # then an unused baseline is red
    gaps = sorted({gap for suite in suites for gap in suite.coverage.gaps})
    notes = [
        *([] if is_strict else left),
        *(*noted, *meant, *(f"not collected: {gap}" for gap in gaps if ": collection " in gap)),
        *(doubts if is_strict else []),
        *(*_differences(parts), *(f"skipped: {line}" for line in merged_reasons(skipped(tests)))),
    ]
    partial = [plan.path.name for plan in plans if not is_whole(plan.document)]
    notes += [f"{name}: not every test was asked, see {name}.log" for name in partial]
    troubles += left if is_strict else []
    return Night(tuple(parts), tuple(troubles), (*notes, *silent(tests)), _judged(parts, folders))


def _read(paths: Iterable[Path]) -> tuple[list[ResultsFile], list[str]]:
    parts, troubles = [], []
    for path in dict.fromkeys(paths):
        try:
            parts.append(ResultsFile.read(path, exact=True))
        except ResultsError as error:
            troubles.append(" ".join(str(error).split()))
    return parts, troubles


def _trouble(part: ResultsFile, tests: Tests) -> str:
    """Why the night is not green for one width, and which of its tests it left; empty where it is."""
    width, document, name = _width(part), part.document, part.path.name
    code = document.exit_code
    if code == _NO_TESTS and width is not None and tests.planned and width not in tests.planned.values():
        return f"{name}: no test asks for {width} GPU(s); leave {width} out of [suite] gpus"
    if document.unfinished:
        why = _ENDED_BY.get(document.unfinished, document.unfinished)
        return f"{name}: unfinished ({why}){_left(width, tests)}"
    if code is None:  # of a version that did not say: its verdicts do
        code = int(any(result.verdict in FAILING for result in document.results))
    how = ended(part.path)
    last = how.exit_code if how is not None else code  # pytest may have died after its results
    if how is not None and last not in (0, _TESTS_FAILED):
        return f"{name}: {how.told}"
    if last or code:
        return f"{name}: pytest ended with exit code {last or code}"
    # Each file is of a width that somebody asked for.
    return "" if document.results else f"{name}: no case was measured, all were skipped"


def _left(width: int | None, tests: Tests) -> str:
    left = tests.not_reached(width) if width is not None else []
    return f"; not judged: {some_of(left)}" if left else ""


def _width(part: ResultsFile) -> int | None:
    """Of its tests, where it says; a plan's are of all."""
    return part.document.suite.perf_width if part.document.suite else None


def _width_of(name: str) -> int | None:
    number = name.removesuffix(".json").rpartition("-")[2]
    return int(number) if number.isascii() and number.isdigit() else None


def _of_whole_runs(parts: Sequence[ResultsFile]) -> tuple[list[str], list[str]]:
    """A line for each run about all its cases together: what has failed it, and what is only noted."""
    failing, notes = [], []
    for part in parts:
        for common in part.document.common.values():
            if verdict_fails(common.verdict, strict=bool(part.document.suite and part.document.suite.strict)):
                failing.append(f"{part.path.name}: {common.told or 'all cases: ' + common.verdict}")
            elif common.told:
                notes.append(f"{part.path.name}: {common.told}")
        failing += [f"{part.path.name}: {part.document.unjudged}"] if part.document.unjudged else []
    return failing, notes


def _judged(parts: Sequence[ResultsFile], folders: Sequence[Path]) -> str:
    """The revision, the jobs, their starts and the nodes that failed meanwhile; empty where no file says."""
    jobs = [part.document.slurm for part in parts if part.document.slurm]
    names, starts = sorted({job.job for job in jobs}), max((job.starts for job in jobs), default=1)
    failed: set[str] = set()
    for log in (path for name in names for folder in folders for path in folder.glob(f"*-{name}.log")):
        found = _FAILED.findall(text_of(log))
        failed |= {node for nodes, node_alone in found for node in (nodes or node_alone).split(", ")}
    nodes = f" ({', '.join(sorted(failed))} failed)" if failed else ""
    parts_known = [
        " and ".join(dict.fromkeys(str(part.document.revision) for part in parts if part.document.revision)),
        f"{formats.counted(starts, 'start')}{nodes}" if starts > 1 or failed else "",
        f"SLURM {' '.join(names)}" if names else "",
    ]
    said = "; ".join(filter(None, parts_known))
    return f"judged: {said}" if said else ""


def _differences(parts: Sequence[ResultsFile]) -> list[str]:
    """A line where the widths did not judge the same sources, or not against the same baselines."""
    seen = [(part.path.name, part.document) for part in parts]
    of_each = {
        "revision differs": {name: str(one.revision or "") for name, one in seen},
        "stored baselines differ": {name: one.suite.baselines_digest for name, one in seen if one.suite},
    }
    lines = []
    for what, values in of_each.items():
        known = {name: value for name, value in values.items() if value}
        if len({*known.values()}) > 1:
            lines.append(f"the {what} between widths: {', '.join(f'{name} {value}' for name, value in known.items())}")
    return lines
