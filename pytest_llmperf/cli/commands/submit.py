"""``llmperf submit``: the jobs of a night given to sbatch, or run here; the one that merges their results the last."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import pytest_llmperf
from pytest_llmperf.cli import night_log, readiness, sbatch
from pytest_llmperf.cli.answer import Answer, ClusterError, Screen, add_option
from pytest_llmperf.cli.cluster_file import KEYS, ClusterFile
from pytest_llmperf.cli.night_log import Notice
from pytest_llmperf.cli.readiness import Asked, ask
from pytest_llmperf.support import user_input
from pytest_llmperf.support.files import write_text
from pytest_llmperf.support.user_input import hint


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("cluster", metavar="CLUSTER.ini", type=Path, nargs="?", help="what differs between sites")
    add("--dry-run", action="store_true", help="only show what would be submitted and what it may cost")
    add("--wait", action="store_true", help="stay until it is merged; exit code 1 unless it is green")
    text = "a nightly script of your own, with the same placeholders; default: the one that comes with this package"
    add("--script", metavar="FILE", type=Path, help=text)
    text = "print this cluster file, to start from; without a name: what there is"
    add("--example", metavar="NAME", nargs="?", const="", help=text)
    text = "whom to tell of a cluster file that cannot be read, by the program mail"
    add_option(parser, "--mail", help=text)
    parser.set_defaults(answer=_answer)


def _answer(arguments: argparse.Namespace, _screen: Screen) -> Answer:
    usage: Callable[[str], NoReturn] = arguments.usage
    if arguments.example is not None:
        if arguments.cluster or arguments.script or arguments.dry_run or arguments.wait:
            usage("--example submits nothing; expected it alone")
        return Answer(_example(arguments.example), for_programs=True)
    if arguments.cluster is None:
        usage("expected CLUSTER.ini, or --example to start one")
    script = arguments.script or folder() / "nightly.sbatch"
    if arguments.wait and arguments.dry_run:
        usage("--dry-run submits nothing to --wait for; expected one of them")
    dry_run, wait = bool(arguments.dry_run), bool(arguments.wait)
    try:
        cluster = ClusterFile.read(arguments.cluster)
    except ClusterError as error:
        raise error if dry_run else _alarm_of_unread(arguments, error) from None
    # A new folder for each submission: two of one second do not meet in it.
    night = _Submission(cluster, cluster.results / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    warned, troubles = _earlier(night, reports=not dry_run), list[str]()
    try:
        planned = sbatch.jobs(cluster)
        night = replace(night, planned=planned, scripts=_scripts(night, script, planned))
        warned += readiness.warnings(cluster)
        asked = ask(cluster) if dry_run or cluster.value("suite", "check_python") else None
        if asked is not None:
            if not dry_run:  # which lists them, and goes on
                readiness.check(cluster, asked)
            warned += readiness.doubts(cluster, asked)
    except ClusterError as error:
        raise error if dry_run else night.alarm(f"not submitted: {error}", error) from None
    return Answer(_lines(night, warned, asked if dry_run else None, troubles, wait=wait), troubles, acts=True)


_ADDRESS = re.compile(r"^mail\s*[=:]\s*(.+)$|--mail=([^\s']+)", re.MULTILINE)


def _alarm_of_unread(arguments: argparse.Namespace, error: ClusterError) -> ClusterError:
    """``error``, mailed unless somebody watches: to ``--mail``, else to whom the file or the last night here names."""
    if sys.stderr is not None and sys.stderr.isatty():
        return error
    address = arguments.mail
    for path in (arguments.cluster, *sorted(Path(KEYS["suite"]["results"].default or "").glob("*/merge.sbatch"))[-1:]):
        with suppress(OSError):
            found = _ADDRESS.search(path.read_text(encoding="utf-8", errors="replace"))
            address = address or (user_input.mail((found[1] or found[2]).strip()) if found else "") or ""
    if not address:
        return ClusterError(f"{error}; nobody was mailed, as no address is known: name one with --mail")
    unmailed = Notice(arguments.cluster.stem, "llmperf submit", address).send("RED", [f"not submitted: {error}"])
    return ClusterError("; ".join([str(error), *(unmailed or [f"mailed to {address}"])]))


# The scripts of a night and the cluster files to start from; one source, which people read in slurm/.
def folder() -> Path:
    """Where they are: inside of an installed package, beside that of a checkout; ClusterError: in neither place."""
    package = Path(pytest_llmperf.__file__).parent
    places = [place / "slurm" for place in (package, package.parent)]
    for place in places:
        if (place / "nightly.sbatch").is_file():
            return place
    where = " or ".join(map(str, places))
    raise ClusterError(f"no nightly.sbatch in {where}; install pytest-llmperf anew, or name the script with --script")


def _example(name: str) -> list[str]:
    """The lines of one; without a name a line for each, with what its first line says of it."""
    paths = sorted(folder().glob("clusters/*.ini"))
    examples = {path.stem: path.read_text(encoding="utf-8").splitlines() for path in paths}
    if not name:
        width = max(map(len, examples), default=0)
        listed = [f"{stem:{width}}  {lines[0].removeprefix('; ')}" for stem, lines in examples.items()]
        return [*listed, "", "llmperf submit --example NAME > my-cluster.ini writes one to start from"]
    found = examples.get(name.removesuffix(".ini"))
    if found is None:
        raise ClusterError(f"no example {name!r}{hint(name, examples)}; known: {', '.join(examples)}")
    return found


@dataclass(frozen=True)
class _Submission:
    cluster: ClusterFile
    results: Path
    planned: Sequence[sbatch.Job] = ()
    scripts: Mapping[Path, str] = field(default_factory=dict)
    """By where they will lie; the one that merges is the last."""

    def notice(self, night: str = "") -> Notice:
        file, cluster = self.cluster.nights_file, self.cluster
        nights = file if file.parent.is_dir() else None
        return Notice(
            night or self.results.name, cluster.text("cluster", "name"), cluster.text("suite", "mail"), nights
        )

    def alarm(self, line: str, error: ClusterError) -> ClusterError:
        """``error``, once a night without results is noted, and mailed unless somebody watches this command."""
        is_watched = sys.stderr is not None and sys.stderr.isatty()
        return ClusterError("; ".join([str(error), *self.notice().alarm(line, mailed=not is_watched)]))

    def noted(self, line: str) -> Iterator[str]:
        """A line about this night in the file of all: one that is never merged is seen there too."""
        for trouble in Notice(self.results.name, nights=self.cluster.nights_file).note(line):
            yield f"warning: {trouble}"

    def left(self, ids: Sequence[str]) -> str:
        """What to do about jobs that no other will merge."""
        if not ids:
            return ""
        merge = [self.cluster.text("suite", "python"), "-m", "pytest_llmperf.cli", "merge"]
        merge += sbatch.merge_arguments(self.cluster, self.results, self.planned)
        return (
            f"; submitted all the same, with no job that merges: {' '.join(ids)}; "
            f"end them with: scancel {' '.join(ids)}, or once they have ended, merge their results with: "
            f"cd {shlex.quote(str(self.cluster.checkout))} && {shlex.join(merge)}"
        )


def _lines(
    night: _Submission, warned: Sequence[str], shown: Asked | None, troubles: list[str], *, wait: bool
) -> Iterator[str]:
    """Each once it is done; what goes wrong meanwhile is in ``troubles``. ``shown``: the tests of a dry run."""
    yield from (f"warning: {line}" for line in warned)
    yield from (job.title for job in night.planned)
    yield f"{sbatch.cost(night.cluster, night.planned)}; what cases cost is told by pytest --perf-dry-run"
    try:
        if shown is not None:
            yield from readiness.listing(night.cluster, shown)
            yield from ("", *next(iter(night.scripts.values())).splitlines())
        else:
            yield from _steps(night, wait=wait)
    except ClusterError as error:
        troubles.append(str(error))


def _earlier(night: _Submission, *, reports: bool) -> list[str]:
    """A line for each night that was submitted and never merged; those that need help are noted and mailed, once."""
    try:
        standings = night_log.standings(night.cluster.nights_file)
    except OSError:
        return []
    lines = []
    for earlier, words in standings:
        is_news = reports and night_log.warning_in(words) - earlier.warned
        unreported = night.notice(earlier.name).alarm(words) if is_news else []
        lines.append("; ".join([f"earlier night {earlier.name}: {words}", *unreported]))
    return lines


def _scripts(night: _Submission, template: Path, planned: Sequence[sbatch.Job]) -> dict[Path, str]:
    cluster, results = night.cluster, night.results
    sbatch.check_budget(cluster, planned)
    try:
        text = template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{template}: not read ({error}); name the nightly script with --script") from None
    if not any(line.startswith("#SBATCH") for line in text.splitlines()):
        raise ClusterError(f"{template}: no line begins with #SBATCH; expected a script like {folder()}/nightly.sbatch")
    if "--perf-width" not in text:  # it would leave out tests, and say nothing
        what = "--perf-width in it, by which pytest runs the tests of a width"
        raise ClusterError(f"{template}: no {what}; begin with a copy of slurm/nightly.sbatch")
    found = {
        results / f"nightly-{max(job.widths)}.sbatch": sbatch.filled(text, cluster, job, results) for job in planned
    }
    merging = (folder() / "merge.sbatch").read_text("utf-8")
    arguments = sbatch.merge_arguments(cluster, results, planned)
    return {**found, results / "merge.sbatch": sbatch.filled_merge(merging, cluster, results, arguments)}


def _steps(night: _Submission, *, wait: bool) -> Iterator[str]:
    cluster, results = night.cluster, night.results
    *paths, merging = night.scripts
    try:
        where = results
        try:
            results.mkdir(parents=True)
            for where, text in night.scripts.items():
                write_text(where, text)
        except OSError as error:
            why = f"a folder that can be written; {where}: not written ({error.strerror or error})"
            raise cluster.wrong("suite", "results", why) from None
        if not cluster.is_local:
            _test(night, paths, merging)
    except ClusterError as error:
        shutil.rmtree(results, ignore_errors=True)  # this submission's own, and nothing of it is submitted
        raise night.alarm(f"not submitted: {error}", error) from None
    if cluster.is_local:
        yield f"results: {results}"
        yield from night.noted("started on this machine")
        code = sbatch.run_here(paths[0])
        code = sbatch.run_here(merging) or code
        if code:
            raise ClusterError(f"{results}: the night is not green (exit code {code})")
        return
    ids = list[str]()
    yield from _submit(night, paths, merging, ids)
    found = night_log.first_look(ids[:-1])
    yield from (f"squeue: {job} {state}" for job, state in found.items())
    # One that waits for what does not come by itself is noted and mailed.
    if stuck := [f"{job} {state}" for job, state in found.items() if state.is_stuck]:
        line = f"{night_log.STUCK}{', '.join(stuck)}; it may never start"
        yield f"warning: {night.alarm(line, ClusterError(line))}"
    yield f"results: {results}"
    if wait:
        yield from night_log.waited(night.notice(), ids[:-1], ids[-1])


def _test(night: _Submission, paths: Sequence[Path], merging: Path) -> None:
    """Ask sbatch about every job before the first is submitted: without the last one a night goes unreported."""
    for words in ([*sbatch.merge_options(night.cluster, []), str(merging)], *([str(path)] for path in paths)):
        sbatch.check_taken(night.cluster, words)


def _submit(night: _Submission, paths: Sequence[Path], merging: Path, ids: list[str]) -> Iterator[str]:
    """Submit all, the one that merges the last: their numbers go to ``ids``."""
    try:
        for path in paths:
            ids.append(sbatch.sbatch([str(path)]))
            yield f"submitted {ids[-1]}: {path}"
        last = sbatch.sbatch([*sbatch.merge_options(night.cluster, ids), str(merging)])
        yield f"submitted {last}: merges their results"
        yield from night.noted(f"submitted as {' '.join(ids)}, to be merged by {last}")
        ids.append(last)
    except ClusterError as error:
        is_refused = isinstance(error, sbatch.RefusedError)
        why = sbatch.refused(night.cluster, str(error)) if is_refused else error
        how = f"submitted as {' '.join(ids)}, with no job that merges: {why}" if ids else f"not submitted: {why}"
        if not ids and is_refused:
            shutil.rmtree(night.results, ignore_errors=True)  # this submission's own, and no job knows of it
        raise night.alarm(how, ClusterError(f"{why}{night.left(ids)}")) from None
    except KeyboardInterrupt:
        if ids:
            yield from night.noted(f"submitted as {' '.join(ids)}, with no job that merges: interrupted")
        yield f"interrupted; sbatch may have taken one more job, see squeue{night.left(ids)}"
        raise
