"""One night from the command line: its jobs submitted, its results merged; lines for whoever asked."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import pytest_llmperf
from pytest_llmperf.cli.answer import ClusterError
from pytest_llmperf.cli.merge.night_results import Night
from pytest_llmperf.cli.merge.notice import Notice
from pytest_llmperf.cli.nights import night_log
from pytest_llmperf.cli.nights.night_log import first_look
from pytest_llmperf.cli.submit import readiness, sbatch
from pytest_llmperf.cli.submit.cluster_file import ClusterFile
from pytest_llmperf.cli.submit.readiness import ask, check, doubts, listing, waited
from pytest_llmperf.cli.submit.sbatch import (
    Job,
    check_budget,
    cost,
    filled,
    filled_merge,
    jobs,
    merge_arguments,
    shares,
)
from pytest_llmperf.report.results_json import write_json
from pytest_llmperf.support.files import write_text
from pytest_llmperf.support.suggestions import hint

# Templates: the scripts of a night and the cluster files to start from; one source, which people read in slurm/.


def folder() -> Path:
    """Where they are: inside of an installed package, beside that of a checkout.

    Raises:
        ClusterError: in neither place.
    """
    package = Path(pytest_llmperf.__file__).parent
    places = [place / "slurm" for place in (package, package.parent)]
    for place in places:
        if (place / "nightly.sbatch").is_file():
            return place
    told = " or ".join(map(str, places))
    raise ClusterError(f"no nightly.sbatch in {told}; install pytest-llmperf anew, or name the script with --script")


def listed() -> Iterator[str]:
    """A line for each example: its name, and what its first line says of it."""
    examples = _examples()
    width = max(map(len, examples), default=0)
    for name, path in examples.items():
        yield f"{name:{width}}  {_lines(path)[0].removeprefix('; ')}"
    yield ""
    yield "llmperf submit --example NAME > my-cluster.ini writes one to start from"


def example(name: str) -> list[str]:
    """The lines of the example called ``name``.

    Raises:
        ClusterError: none is called so.
    """
    examples = _examples()
    path = examples.get(name.removesuffix(".ini"))
    if path is None:
        raise ClusterError(f"no example {name!r}{hint(name, examples)}; known: {', '.join(examples)}")
    return _lines(path)


def _examples() -> dict[str, Path]:
    return {path.stem: path for path in sorted((folder() / "clusters").glob("*.ini"))}


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


_MERGE = "merge.sbatch"

# Of a script of one's own: without it a night would leave out tests, or know no bound, and say nothing.
_NEEDED = {"--perf-width": "by which pytest runs the tests of a width", "@budget@": "which budget_gpu_hours needs"}


def submitted(path: Path, template: Path, *, dry_run: bool, wait: bool = False) -> tuple[Iterator[str], list[str]]:
    """Submit what the cluster file at ``path`` says: lines, each once it is done, and what goes wrong meanwhile.

    Raises:
        ClusterError: a file or the budget says no; nothing was submitted.
    """
    cluster = ClusterFile.read(path)
    results = sbatch.results_folder(cluster)
    warned, troubles = _earlier(cluster, told=not dry_run), list[str]()
    if wait and _names_clusters(cluster):
        raise cluster.wrong("sbatch", "options", "no --clusters beside --wait, which asks this cluster's queue alone")
    try:
        planned, scripts = _prepared(cluster, template, results)
        warned += readiness.warnings(cluster)
        asked = ask(cluster) if dry_run or cluster.text("suite", "check_python") == "yes" else None
        if asked is not None and not dry_run:  # which lists them, and goes on
            check(cluster, asked)
            warned += doubts(cluster, asked)
    except ClusterError as error:
        raise error if dry_run else _alarm(cluster, results, f"not submitted: {error}", error) from None
    if asked is not None and dry_run:
        steps = chain(
            _titles(cluster, planned), listing(cluster, asked), ["", *next(iter(scripts.values())).splitlines()]
        )
    else:
        steps = chain(_titles(cluster, planned), _steps(cluster, planned, scripts, results, wait=wait))
    return _noting(chain([f"warning: {line}" for line in warned], steps), troubles), troubles


def _prepared(cluster: ClusterFile, template: Path, results: Path) -> tuple[list[Job], dict[Path, str]]:
    """The jobs, and their scripts by where they will lie; the one that merges is the last."""
    planned = jobs(cluster)
    check_budget(cluster, planned)
    text = _read(template, cluster)
    names = [f"nightly-{max(job.widths)}.sbatch" for job in planned]
    scripts = {
        results / name: filled(text, cluster, job, results, share)
        for name, job, share in zip(names, planned, shares(cluster, planned), strict=True)
    }
    merging, arguments = (folder() / _MERGE).read_text("utf-8"), merge_arguments(cluster, results, planned)
    return planned, {**scripts, results / _MERGE: filled_merge(merging, cluster, results, arguments)}


def _notice(cluster: ClusterFile, night: str) -> Notice:
    file = sbatch.nights_file(cluster)
    return Notice(
        night,
        name=cluster.text("cluster", "name"),
        mail=cluster.text("suite", "mail"),
        nights=file if file.parent.is_dir() else None,
    )


def _alarm(cluster: ClusterFile, results: Path, line: str, error: ClusterError) -> ClusterError:
    """``error``, once a night without results is noted, and mailed where nobody sees what this command prints."""
    is_watched = sys.stderr is not None and sys.stderr.isatty()
    untold = _notice(cluster, results.name).alarm(line, mailed=not is_watched)
    return ClusterError("; ".join([str(error), *untold]))


def _earlier(cluster: ClusterFile, *, told: bool) -> list[str]:
    """A line for each night that was submitted and never merged; those that need help are noted and mailed, once."""
    try:
        standings = night_log.standings(sbatch.nights_file(cluster))
    except OSError:
        return []
    lines = []
    for standing in standings:
        untold: list[str] = []
        if told and standing.warning and standing.warning not in standing.night.warned:
            untold = _notice(cluster, standing.night.name).alarm(standing.words)
        lines.append("; ".join([f"earlier night {standing.night.name}: {standing.words}", *untold]))
    return lines


def merged(
    night: Night, json_file: Path | None, markdown_file: Path | None, notice: Notice
) -> tuple[list[str], list[str]]:
    """Write the files that were asked for, and tell: the page as lines, and all that keeps the night from being green.

    That nobody could be told does: of a green night too somebody waits for word.
    """
    page, unwritten = night.page(), list[str]()
    try:
        if json_file is not None:
            write_json(json_file, night.document())
    except OSError as error:
        unwritten.append(_not_written(json_file, error))
    try:
        if markdown_file is not None:
            write_text(markdown_file, "\n".join([*page, ""]))
    except OSError as error:
        unwritten.append(_not_written(markdown_file, error))
    untold = notice.tell(night.headline, page, unwritten, night.troubles)
    return page, [*night.troubles, *unwritten, *untold]


def _noting(lines: Iterator[str], troubles: list[str]) -> Iterator[str]:
    try:
        yield from lines
    except ClusterError as error:
        troubles.append(str(error))


def _titles(cluster: ClusterFile, planned: Sequence[Job]) -> Iterator[str]:
    for job in planned:
        yield job.title
    yield f"{cost(cluster, planned)}; what cases cost is told by pytest --perf-dry-run"


def _steps(
    cluster: ClusterFile, planned: Sequence[Job], scripts: Mapping[Path, str], results: Path, *, wait: bool
) -> Iterator[str]:
    *paths, merging = scripts
    try:
        _write(cluster, scripts, results)
        if not cluster.is_local:
            _test(cluster, planned, paths, merging)
    except ClusterError as error:
        shutil.rmtree(results, ignore_errors=True)  # this submission's own, and nothing of it is submitted
        raise _alarm(cluster, results, f"not submitted: {error}", error) from None
    if cluster.is_local:
        yield f"results: {results}"
        yield from _noted(cluster, results, "started on this machine")
        code = sbatch.run_here([str(paths[0])])
        code = sbatch.run_here([str(merging)]) or code
        if code:
            raise ClusterError(f"{results}: the night is not green (exit code {code})")
        return
    ids = list[str]()
    yield from _submit(cluster, planned, paths, merging, ids)
    yield from _first_look(cluster, results, ids[:-1])
    yield f"results: {results}"
    if wait:
        yield from waited(_notice(cluster, results.name), ids[:-1], ids[-1])


def _test(cluster: ClusterFile, planned: Sequence[Job], paths: Sequence[Path], merging: Path) -> None:
    """Ask sbatch of every job before the first is submitted: a night without its last one would be told to nobody."""
    options, own = sbatch.merge_options(cluster, []), cluster.words("sbatch", "merge_options")
    without = [*options[: len(options) - len(own)], str(merging)] if own else []
    sbatch.check_taken(cluster, [*options, str(merging)], key="merge_options", without=without)
    for job, path in zip(planned, paths, strict=True):
        sbatch.check_taken(cluster.at(job.widths[0]), [str(path)])


def _submit(
    cluster: ClusterFile, planned: Sequence[Job], paths: Sequence[Path], merging: Path, ids: list[str]
) -> Iterator[str]:
    """Submit all, the one that merges the last: their numbers go to ``ids``."""
    results = merging.parent
    try:
        for path in paths:
            ids.append(sbatch.sbatch([str(path)]))
            yield f"submitted {ids[-1]}: {path}"
        last = sbatch.sbatch([*sbatch.merge_options(cluster, ids), str(merging)])
        yield f"submitted {last}: merges their results"
        yield from _noted(cluster, results, f"{_submitted_as(cluster, ids)}, to be merged by {last}")
        ids.append(last)
    except ClusterError as error:
        is_refused = isinstance(error, sbatch.RefusedError)
        why = sbatch.refused(cluster, str(error)) if is_refused else error
        how = f"{_submitted_as(cluster, ids)}, with no job that merges: {why}" if ids else f"not submitted: {why}"
        if not ids and is_refused:
            shutil.rmtree(results, ignore_errors=True)  # this submission's own, and no job knows of it
        told = ClusterError(f"{why}{_left(cluster, planned, ids, results)}")
        raise _alarm(cluster, results, how, told) from None
    except KeyboardInterrupt:
        if ids:
            yield from _noted(cluster, results, f"{_submitted_as(cluster, ids)}, with no job that merges: interrupted")
        yield f"interrupted; sbatch may have taken one more job, see squeue{_left(cluster, planned, ids, results)}"
        raise


def _names_clusters(cluster: ClusterFile) -> bool:
    return any(word.startswith(("-M", "--clusters")) for word in cluster.words("sbatch", "options"))


def _submitted_as(cluster: ClusterFile, ids: Sequence[str]) -> str:
    # Where another cluster has them, this one's queue knows nothing of them.
    is_elsewhere = "SLURM_CLUSTERS" in os.environ or _names_clusters(cluster)
    return f"submitted {'elsewhere ' if is_elsewhere else ''}as {' '.join(ids)}"


def _first_look(cluster: ClusterFile, results: Path, ids: Sequence[str]) -> Iterator[str]:
    """What SLURM says of the jobs; one that waits for what does not come by itself is noted and mailed."""
    if "elsewhere" in _submitted_as(cluster, ids):
        return
    found = first_look(ids)
    for job, state in found.items():
        yield f"squeue: {job} {state}"
    stuck = [f"{job} {state}" for job, state in found.items() if state.is_stuck]
    if stuck:
        line = f"{night_log.STUCK}{', '.join(stuck)}; it may never start"
        yield f"warning: {_alarm(cluster, results, line, ClusterError(line))}"


def _noted(cluster: ClusterFile, results: Path, line: str) -> Iterator[str]:
    """A line about this night in the file of all: one that is never merged is seen there too."""
    for trouble in Notice(results.name, nights=sbatch.nights_file(cluster)).note(line):
        yield f"warning: {trouble}"


def _left(cluster: ClusterFile, planned: Sequence[Job], ids: Sequence[str], results: Path) -> str:
    """What to do about jobs that no other will merge."""
    if not ids:
        return ""
    line = sbatch.merge_line(cluster, results, planned)
    return (
        f"; submitted all the same, with no job that merges: {' '.join(ids)}; "
        f"end them with: scancel {' '.join(ids)}, or once they have ended, merge their results with: {line}"
    )


def _read(template: Path, cluster: ClusterFile) -> str:
    try:
        text = template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"{template}: not read ({error}); name the nightly script with --script") from None
    if not any(line.startswith("#SBATCH") for line in text.splitlines()):
        raise ClusterError(f"{template}: no line begins with #SBATCH; expected a script like {folder()}/nightly.sbatch")
    for word, what in _NEEDED.items():
        if word not in text and (word != "@budget@" or cluster.budget is not None):
            raise ClusterError(f"{template}: no {word} in it, {what}; begin with a copy of slurm/nightly.sbatch")
    return text


def _write(cluster: ClusterFile, scripts: Mapping[Path, str], results: Path) -> None:
    where = results
    try:
        results.mkdir(parents=True)
        for where, text in scripts.items():
            write_text(where, text)
    except OSError as error:
        raise cluster.wrong("suite", "results", f"a folder that can be written; {_not_written(where, error)}") from None


def _not_written(path: Path | None, error: OSError) -> str:
    return f"{path}: not written ({error.strerror or error})"
