"""The command: its options, and what it answers."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatchcase
from pathlib import Path

from pytest_llmperf.cli.answer import Answer, CaseError
from pytest_llmperf.cli.arguments import add_shared
from pytest_llmperf.cli.history.documents import history_document
from pytest_llmperf.cli.history.pages import case_page, list_page
from pytest_llmperf.cli.screen import Screen
from pytest_llmperf.engine.history.history import History, of_project
from pytest_llmperf.engine.history.machine_noise import scattering
from pytest_llmperf.judge.case_histories import histories
from pytest_llmperf.records.past_result import PastResult
from pytest_llmperf.run.reading import usual_history
from pytest_llmperf.run.revision import project_of
from pytest_llmperf.support import quantities
from pytest_llmperf.support.suggestions import nearest

_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
# Fewer digits of a digest are as likely a word.
_DIGEST = re.compile(r"[0-9a-f]{6,16}")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of ``llmperf history``."""
    add = parser.add_argument
    add("case", metavar="CASE", nargs="?", help="an id, a part of one, a pattern such as '*liger*', or a digest")
    what = "stores, --perf-json files, or folders of them; default: the store to which runs add"
    add("--from", dest="sources", metavar="PATH", type=Path, nargs="+", help=what)
    add("--since", metavar="DAY", type=_since, help="only runs since that UTC day, or of the last 30d")
    add_shared(parser, "history")
    parser.set_defaults(answer=_answer, usage=parser.error)


def _since(text: str) -> str:
    if _DAY.fullmatch(text):
        try:
            return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=timezone.utc).date().isoformat()
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: no such day, expected e.g. 2026-10-31") from None
    hours = quantities.duration_hours(text)
    if hours is None or hours > 24 * 36500:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a day, e.g. 2026-10-31, or how long ago, e.g. 30d")
    return (datetime.now(timezone.utc) - timedelta(hours=hours)).isoformat()


def _answer(arguments: argparse.Namespace, screen: Screen) -> Answer:
    sources = arguments.sources or [usual_history()]
    found = History.read(sources)
    if found.troubles and not found.results and any(source.exists() for source in sources):
        # Why nothing could be read, and not that there is nothing.
        raise CaseError("\n".join(found.troubles))
    results = _of_one_project(_chosen(found.results, arguments, sources), named=bool(arguments.sources))
    named = _named(results, arguments.case) if arguments.case else results
    # The cases of a run tell of its GPUs, also where one of them alone was asked for.
    asked = {(result.machine, result.digest) for result in named}
    machines = {result.machine for result in named}
    beside = [result for result in results if result.machine in machines]
    known = scattering(machines, arguments.perf_baselines)
    several = histories(beside, known, asked)
    if arguments.json:
        lines = json.dumps(history_document(several), indent=1, allow_nan=False).splitlines()
        return Answer(lines, found.troubles, for_programs=True)
    if arguments.case and len({one.id for one in several}) == 1:
        pages = [case_page(one, screen) for one in several]
        return Answer([line for page in pages for line in ("", *page)][1:], found.troubles)
    return Answer(list_page(several, screen), found.troubles)


def _of_one_project(results: Sequence[PastResult], *, named: bool) -> Sequence[PastResult]:
    """Of the store of all projects those of this folder's; of what was ``named`` all that is there."""
    known = {result.project for result in results} - {""}
    here = [project_of(Path.cwd()), *map(str, Path.cwd().parents)]
    if named and len(known) != 1:
        return results
    return of_project(results, next(iter(known)) if named else next((one for one in here if one in known), here[0]))


def _chosen(
    results: Sequence[PastResult], arguments: argparse.Namespace, sources: Sequence[Path]
) -> Sequence[PastResult]:
    """Those of the machine kind and the time that were asked for.

    Raises:
        CaseError: there are none.
    """
    where = ", ".join(map(str, sources))
    if not results:
        raise CaseError(
            f"{where}: no history here, expected results of runs; each run adds its own to --perf-history (on by "
            "default), and --from reads --perf-json files"
        )
    machines = sorted({result.machine for result in results})
    if arguments.machine and arguments.machine not in machines:
        known = ", ".join(machines)
        raise CaseError(f"{arguments.machine}: {where} has no runs on this machine kind, expected one of {known}")
    found = [result for result in results if arguments.machine in (None, result.machine)]
    since = [result for result in found if arguments.since is None or result.began >= arguments.since]
    if not since:
        raise CaseError(f"--since {arguments.since[:10]}: no run since then, the newest began {found[-1].began[:10]}")
    return since


def _named(results: Sequence[PastResult], case: str) -> Sequence[PastResult]:
    """Those that ``case`` names: the very id, else a digest, a pattern, a part of ids.

    Raises:
        CaseError: none.
    """
    ids = {result.id for result in results}
    if case in ids:
        return [result for result in results if result.id == case]
    if _DIGEST.fullmatch(case) and (found := [one for one in results if one.digest.startswith(case)]):
        return found
    patterns = (case, f"*{case}*")
    matching = next(filter(None, ({each for each in ids if fnmatchcase(each, one)} for one in patterns)), set[str]())
    if not matching:
        raise CaseError(
            f"{case}: no such case in this history, expected an id, a part of one, a pattern or a digest; the nearest "
            f"id is {nearest(case, ids, at_least=0.0)!r}; llmperf history lists them all"
        )
    return [result for result in results if result.id in matching]
