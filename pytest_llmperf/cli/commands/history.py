"""``llmperf history``: what a case took, run by run, and where that changed."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pytest_llmperf.cli.answer import DIGEST, Answer, CaseError, Screen, add_option, add_shared, plain, table
from pytest_llmperf.judge.case_histories import CaseHistory, Segment, histories
from pytest_llmperf.records.result import PastResult
from pytest_llmperf.report.text import Column
from pytest_llmperf.run.history import History, level_columns, of_project, project_of, scattering
from pytest_llmperf.run.reading import usual_history, usual_observed
from pytest_llmperf.support import formats, user_input

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("case", metavar="CASE", nargs="?")
    add("--from", dest="sources", metavar="PATH", type=Path, nargs="+")
    add("--since", metavar="DAY", type=_since)
    add_shared(parser, "history")
    add_option(parser, "--json")
    parser.set_defaults(answer=_answer, usage=parser.error)


def _since(text: str) -> str:
    if _DAY.fullmatch(text):
        try:
            return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=timezone.utc).date().isoformat()
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: no such day, expected e.g. 2026-10-31") from None
    hours = user_input.duration_hours(text)
    if hours is None or hours > 24 * 36500:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a day, e.g. 2026-10-31, or how long ago, e.g. 30d")
    return (datetime.now(timezone.utc) - timedelta(hours=hours)).isoformat()


def _answer(arguments: argparse.Namespace, screen: Screen) -> Answer:
    usual = [path for path in (usual_history(), usual_observed()) if path.exists()]
    sources = arguments.sources or usual or [usual_history()]
    found = History.read(sources)
    if found.troubles and not found.results and any(source.exists() for source in sources):
        # Why nothing could be read, and not that there is nothing.
        raise CaseError("\n".join(found.troubles))
    chosen = _chosen(found.results, arguments, sources)
    results = _of_one_project(chosen, named=bool(arguments.sources))
    named = _named(results, arguments.case) if arguments.case else results
    # The cases of a run tell of its GPUs, also where one of them alone was asked for.
    asked = {(result.machine, result.digest) for result in named}
    machines = {result.machine for result in named}
    beside = [result for result in results if result.machine in machines]
    several = histories(beside, scattering(machines, arguments.perf_baselines), asked)
    if arguments.json:
        document = {"schema": 1, "cases": [_document(one) for one in several]}
        return Answer(json.dumps(document, indent=1, allow_nan=False).splitlines(), found.troubles, for_programs=True)
    if arguments.case and len({one.id for one in several}) == 1:
        pages = [case_page(one, screen) for one in several]
        return Answer([line for page in pages for line in ("", *page)][1:], found.troubles)
    is_elsewhere = results is chosen and not arguments.sources
    head = [f"no runs of {plain(project_of(Path.cwd()))} yet; of all projects:", ""] if is_elsewhere else []
    return Answer([*head, *list_page(several, screen)], found.troubles)


def _of_one_project(results: Sequence[PastResult], *, named: bool) -> Sequence[PastResult]:
    """From the store of all projects those of this folder's; everything from what was ``named``."""
    known = {result.project for result in results} - {""}
    here = [project_of(Path.cwd()), *map(str, Path.cwd().parents)]
    if named and len(known) != 1:
        return results
    return of_project(results, next(iter(known)) if named else next((one for one in here if one in known), here[0]))


def _chosen(results: Sequence[PastResult], asked: argparse.Namespace, sources: Sequence[Path]) -> Sequence[PastResult]:
    """Those of the machine kind and the time that were asked for; CaseError: there are none."""
    where = ", ".join(map(str, sources))
    if not results:
        raise CaseError(
            f"{where}: no history here, expected results of runs; each run adds its own to --perf-history (on by "
            "default), and --from reads --perf-json files"
        )
    machines = sorted({result.machine for result in results})
    if asked.machine and asked.machine not in machines:
        known = ", ".join(machines)
        raise CaseError(f"{asked.machine}: {where} has no runs on this machine kind, expected one of {known}")
    found = [result for result in results if asked.machine in (None, result.machine)]
    if not (since := [result for result in found if asked.since is None or result.began >= asked.since]):
        raise CaseError(f"--since {asked.since[:10]}: no run since then, the newest began {found[-1].began[:10]}")
    return since


def _named(results: Sequence[PastResult], case: str) -> Sequence[PastResult]:
    """Those that ``case`` names: the very id, else a digest, a pattern, a part of ids; CaseError: none."""
    ids = {result.id for result in results}
    if case in ids:
        return [result for result in results if result.id == case]
    if DIGEST.fullmatch(case) and (found := [one for one in results if one.digest.startswith(case)]):
        return found
    patterns = (case, f"*{case}*")
    matching = next(filter(None, ({each for each in ids if fnmatchcase(each, one)} for one in patterns)), set[str]())
    if not matching:
        raise CaseError(
            f"{case}: no such case in this history, expected an id, a part of one, a pattern or a digest; the nearest "
            f"id is {user_input.nearest(case, ids, at_least=0.0)!r}; llmperf history lists them all"
        )
    return [result for result in results if result.id in matching]


# The page of one case: its levels as a table, and what changed with each.
_MOST_WATCHED = 5
# Of a change point without a rate; of a step that is no change point.
_OTHER_WORK = "other work"
_WITH_HOST = "the host changed with it: cannot be told apart"


def case_page(history: CaseHistory, screen: Screen) -> list[str]:
    results = history.results
    hosts, runs = {launch.host for result in results for launch in result.launches}, len(results)
    latest = history.latest
    lines = [
        f"{plain(history.id)} on {plain(latest.machine)}: {runs} run{'s' * (runs != 1)}, {results[0].began[:10]} to "
        f"{results[-1].began[:10]}, on {len(hosts)} host{'s' * (len(hosts) != 1)}; digest {plain(latest.digest)}"
        + (f"; project {plain(latest.project)}" if latest.project else "")
    ]
    lines += [_watched(result) for result in results if result.observed][-_MOST_WATCHED:]
    if not history.segments:
        return [*lines, "every run of it was invalid"]
    lines += ["", *table(level_columns(history.segments), screen)]
    for number, segment in enumerate(history.segments[1:], 1):
        different = segment.different or ("nothing else that is recorded changed with it",)
        lines += ["", f"change {number}, {segment.results[0].began[:10]}: {_change(segment)}"]
        lines += [f"  {plain(line)}" for line in different]
    for step in history.steps:
        lines += ["", f"{step.began[:10]}: {formats.percent(step.rate)}, {_WITH_HOST}"]
        lines += [f"  {plain(line)}" for line in step.different]
    if history.is_short:
        lines += ["", "too few runs for a change point of its rate: it takes two before and two after it"]
    return lines


def _watched(result: PastResult) -> str:
    """A real run, and what became of it on its way."""
    seen = result.observed
    told = f"{result.began[:10]}: a real run of {seen['steps']:,.0f} steps, watched"
    if "drift" in seen:
        slower, held = formats.percent(seen["drift"]), formats.change_of(seen.get("held", 0.0), "bytes")
        told += f"; its last quarter against its first: {slower} step time, {held} held"
    return told + (f"; {plain(result.unfinished)}" if result.unfinished else "")


def _change(segment: Segment) -> str:
    if (change := segment.change) is None:
        return "a step does not do what it did"
    told = f"{formats.percent(change.rate)} ({formats.percent(change.low)} to {formats.percent(change.high)})"
    if change.shared is None:
        return told
    return f"{told}, {formats.percent(change.shared)} of all cases that ran with it: look at what they share"


# The page of all cases: their last figure and their latest change point, worst first.

# Of a machine kind; those with a change point are all shown.
_MOST_CASES = 500


def list_page(histories: Sequence[CaseHistory], screen: Screen) -> list[str]:
    lines = list[str]()
    for machine in dict.fromkeys(one.latest.machine for one in histories):
        group = sorted(
            (one for one in histories if one.latest.machine == machine),
            key=lambda one: (one.latest_change is None, not one.steps, one.latest_rate, one.id, one.latest.digest),
        )
        changed = sum(one.latest_change is not None for one in group)
        told = f"{len(group)} case{'s' * (len(group) != 1)}, {changed or 'none'} of them with a change point"
        # What has to be looked at is among the first ones, and no terminal shows thousands at once.
        shown = group[: max(_MOST_CASES, changed)]
        latest, has_projects = [_latest(one) for one in shown], any(one.latest.project for one in shown)
        newest = [one.results[-1] for one in shown]
        columns = [
            Column("case", [plain(one.id) for one in shown], right=False),
            *([Column("project", [plain(one.latest.project) for one in shown], right=False)] if has_projects else []),
            Column("runs", [str(len(one.results)) for one in shown]),
            Column("last run", [one.began[:10] for one in newest], right=False),
            Column("tokens/s/GPU", [formats.tokens_per_second(one.tokens_per_second_per_gpu) for one in newest]),
            Column("verdict", [plain(one.verdict) for one in newest], right=False, colored=True),
            Column("latest change", [rate for rate, _, _ in latest]),
            Column("since", [since for _, since, _ in latest], right=False),
            Column("what else changed", [other for _, _, other in latest], right=False),
        ]
        lines += [*([""] if lines else []), f"{plain(machine)}: {told}", *table(columns, screen)]
        if len(group) > len(shown):
            lines.append(f"{len(group) - len(shown)} more without a change point: name a part of an id, or add --json")
    return lines


def _latest(one: CaseHistory) -> tuple[str, str, str]:
    """The rate of its latest change, since when, and what else changed."""
    latest = one.latest_change
    if one.steps and (latest is None or one.steps[-1].began > latest.results[0].began):
        return formats.percent(one.steps[-1].rate), one.steps[-1].began[:10], _WITH_HOST
    if latest is None:
        return formats.ABSENT, formats.ABSENT, formats.ABSENT
    different, more = "nothing that is recorded", len(latest.different) - 1
    if latest.different:
        different = plain(latest.different[0]) + (f" (+{more})" if more else "")
    what = formats.percent(latest.change.rate) if latest.change else _OTHER_WORK
    return what, latest.results[0].began[:10], different


def _run(one: PastResult) -> dict[str, Any]:
    rate, hosts = one.tokens_per_second_per_gpu, sorted({launch.host for launch in one.launches})
    return {**{name: getattr(one, name) for name in _OF_A_RUN}, "rate": rate, "hosts": hosts}


_OF_A_RUN = "began verdict step_seconds peak_reserved_bytes revision versions counts observed calibrations".split()


def _document(history: CaseHistory) -> dict[str, Any]:
    return {
        "id": history.id,
        "digest": history.latest.digest,
        "machine": history.latest.machine,
        "runs": [*map(_run, history.results)],
        "segments": [*map(_level, history.segments)],
        "with_another_host": [{"at": one.began, "rate": one.rate, "different": one.different} for one in history.steps],
    }


def _level(one: Segment) -> dict[str, Any]:
    runs = {"from": one.results[0].began, "to": one.results[-1].began, "runs": len(one.results)}
    times = {"step_seconds": one.step_seconds, "step_seconds_interval": [one.low, one.high]}
    change = asdict(one.change) if one.change else None
    return {**runs, **times, "rate": one.rate(one.step_seconds), "change": change, "different": one.different}
