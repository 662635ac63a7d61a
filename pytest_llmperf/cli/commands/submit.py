"""``llmperf submit``: the jobs of a night given to sbatch, the one that merges their results the last. And what is
asked of nights afterwards: ``merge``, which that job runs, and ``nights``, where each stands."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import pytest_llmperf
from pytest_llmperf.cli import readiness, sbatch
from pytest_llmperf.cli.answer import Answer, ClusterError, CommandError, Screen
from pytest_llmperf.cli.cluster_file import ClusterFile
from pytest_llmperf.cli.night_results import gather
from pytest_llmperf.cli.night_tests import left_out
from pytest_llmperf.report.results_json import write_json
from pytest_llmperf.support.files import write_text
from pytest_llmperf.support.user_input import argument, duration_hours, hint


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("cluster", metavar="CLUSTER.ini", type=Path, nargs="?")
    add("--dry-run", action="store_true")
    add("--wait", action="store_true")
    add("--script", metavar="FILE", type=Path)
    add("--example", metavar="NAME", nargs="?", const="")
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
    dry_run, cluster = bool(arguments.dry_run), ClusterFile.read(arguments.cluster)
    # A new folder for each submission: two of one second do not meet in it.
    night = _Submission(cluster, cluster.results / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    warned, troubles = [*_earlier(cluster.results)], list[str]()
    planned = sbatch.jobs(cluster)
    night = replace(night, planned=planned, scripts=_scripts(night, script, planned))
    warned += readiness.warnings(cluster)
    asked = readiness.ask(cluster) if dry_run or cluster.value("suite", "check_python") else None
    if asked is not None:
        if not dry_run:  # which lists them, and goes on
            readiness.check(cluster, asked)
        warned += readiness.doubts(cluster, asked)
    shown = asked if dry_run else None
    return Answer(_lines(night, warned, shown, troubles, wait=bool(arguments.wait)), troubles, acts=True)


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
    if (found := examples.get(name.removesuffix(".ini"))) is None:
        raise ClusterError(f"no example {name!r}{hint(name, examples)}; known: {', '.join(examples)}")
    return found


@dataclass(frozen=True)
class _Submission:
    cluster: ClusterFile
    results: Path
    planned: Sequence[sbatch.Job] = ()
    scripts: Mapping[Path, str] = field(default_factory=dict)
    """By where they will lie; the one that merges is the last."""

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
    night: _Submission, warned: Sequence[str], shown: readiness.Asked | None, troubles: list[str], *, wait: bool
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


def _earlier(results: Path) -> Iterator[str]:
    """A line for each night since the last merged one that was submitted and is not merged."""
    with suppress(OSError):
        found = sbatch.nights(results)
        last = max((night.began for night in found if night.merged), default=0.0)
        for night in found:
            if night.began > last:
                yield f"earlier night {night.folder.name}: {night.standing()[0]}"


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
        # Of every job before the first is submitted: without the last one a night goes unreported.
        for words in ([*sbatch.merge_options(cluster, []), str(merging)], *([str(path)] for path in paths)):
            sbatch.check_taken(cluster, words)
    except ClusterError:
        shutil.rmtree(results, ignore_errors=True)  # this submission's own, and nothing of it is submitted
        raise
    ids = list[str]()
    yield from _submit(night, paths, merging, ids)
    yield from (f"squeue: {job} {state}" for job, state in sbatch.first_look(ids[:-1]).items())
    yield f"results: {results}"
    if wait:
        yield from _waited(results)


_WAITING_SECONDS = 10.0
# Jobs that are gone may be those of a controller that has just begun, or the summary is not seen here yet.
_LOOKS = 3


def _waited(folder: Path) -> Iterator[str]:
    """A line whenever the night stands otherwise, then how it went; ClusterError: not green, or never merged."""
    shown, num_lost = "", 0
    while not (night := sbatch.Night.of(folder)).merged:
        said, is_lost = night.standing()
        num_lost = num_lost + 1 if is_lost else 0
        if num_lost == _LOOKS:
            raise ClusterError(f"{folder.name}: {said}")
        if said != shown and not is_lost:
            yield f"{time.strftime('%H:%M:%S')} {said}"
            shown = said
        time.sleep(_WAITING_SECONDS)
    if not night.said.startswith("green"):
        raise ClusterError(f"{folder.name}: {night.said}")
    yield night.said


def _submit(night: _Submission, paths: Sequence[Path], merging: Path, ids: list[str]) -> Iterator[str]:
    """Submit all, the one that merges the last: their numbers go to ``ids``."""
    try:
        for path in paths:
            ids.append(sbatch.sbatch([str(path)]))
            yield f"submitted {ids[-1]}: {path}"
        last = sbatch.sbatch([*sbatch.merge_options(night.cluster, ids), str(merging)])
        yield f"submitted {last}: merges their results"
        ids.append(last)
        with suppress(OSError):  # by it `llmperf nights` knows where the night stands
            write_text(night.results / sbatch.JOBS_FILE, " ".join(ids))
    except ClusterError as error:
        is_refused = isinstance(error, sbatch.RefusedError)
        why = sbatch.refused(night.cluster, str(error)) if is_refused else error
        if not ids and is_refused:
            shutil.rmtree(night.results, ignore_errors=True)  # this submission's own, and no job knows of it
        raise ClusterError(f"{why}{night.left(ids)}") from None
    except KeyboardInterrupt:
        yield f"interrupted; sbatch may have taken one more job, see squeue{night.left(ids)}"
        raise


_MOST_SHOWN = 20


def add_nights_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", metavar="FOLDER", type=Path, nargs="?", default=Path(".llmperf/nightly"))
    time_above_0 = argument(duration_hours, "a time above 0, e.g. 24h, 2d, 1d12h or 90m")
    add("--newer-than", metavar="TIME", type=time_above_0)
    parser.set_defaults(answer=_nights)


def _nights(arguments: argparse.Namespace, _screen: Screen) -> Answer:
    folder, hours, troubles = arguments.folder, arguments.newer_than, list[str]()
    try:
        found = sbatch.nights(folder)
    except OSError as error:
        raise CommandError(
            f"{folder}: not read ({error.strerror or error}); name the folder that [suite] results says"
        ) from None
    lines = [
        f"{time.strftime('%Y-%m-%d %H:%M', time.localtime(night.began))}  {night.folder.name}  {night.standing()[0]}"
        for night in found[-_MOST_SHOWN:]
    ]
    merged = max((night.merged for night in found), default=0.0)
    age = (time.time() - merged) / 3600
    if hours is not None and age > hours:
        last = f"the last was {age:.0f} h ago" if merged else "none was ever"
        troubles.append(f"no night was merged within {hours:g} h; {last}")
    return Answer(lines or [f"no night in {folder}"], troubles)


def add_merge_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("results", metavar="DIR|FILE", type=Path, nargs="+")
    add("--expect", metavar="NAME", action="append", default=[])
    add("--without", metavar="N|wider", action="append", default=[])
    add("--json", metavar="FILE", type=Path)
    add("--markdown", metavar="FILE", type=Path)
    parser.set_defaults(answer=_merge)


def _merge(arguments: argparse.Namespace, _screen: Screen) -> Answer:
    if (without := left_out(arguments.without)) is None:
        arguments.usage(f"--without {' '.join(arguments.without)}: expected numbers of GPUs, or the word wider")
    night = gather(arguments.results, arguments.expect, without)
    writers: list[tuple[Path | None, Callable[[Path], None]]] = [
        (arguments.json, lambda path: write_json(path, night.document())),
        (arguments.markdown, lambda path: write_text(path, "\n".join([*night.page(), ""]))),
    ]
    for path, write in writers:
        try:
            if path is not None:
                write(path)
        except OSError as error:  # which a page that can be written tells
            night = replace(night, troubles=(*night.troubles, f"{path}: not written ({error.strerror or error})"))
    return Answer(night.page(), night.troubles, acts=True)
