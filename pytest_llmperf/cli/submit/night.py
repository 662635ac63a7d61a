"""One night from the command line: its jobs submitted, its results merged; lines for whoever asked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from pytest_llmperf.cli.command_error import ClusterError
from pytest_llmperf.cli.merge.night_results import Night
from pytest_llmperf.cli.merge.notice import Notice
from pytest_llmperf.cli.submit import readiness, sbatch, templates
from pytest_llmperf.cli.submit.cluster_file import ClusterFile
from pytest_llmperf.cli.submit.listing import listing
from pytest_llmperf.cli.submit.sbatch import merge_arguments
from pytest_llmperf.cli.submit.sbatch_jobs import Job, check_budget, cost, jobs, shares
from pytest_llmperf.cli.submit.sbatch_script import filled, filled_merge
from pytest_llmperf.report.results_json import write_json
from pytest_llmperf.support.files import write_text

_MERGE = "merge.sbatch"

# Of a script of one's own: without it a night would leave out tests, or know no bound, and say nothing.
_NEEDED = {"--perf-width": "by which pytest runs the tests of a width", "@budget@": "which budget_gpu_hours needs"}


def submitted(path: Path, template: Path, *, dry_run: bool) -> tuple[Iterator[str], list[str]]:
    """Submit what the cluster file at ``path`` says: lines, each once it is done, and what goes wrong meanwhile.

    Raises:
        ClusterError: a file or the budget says no; nothing was submitted.
    """
    cluster = ClusterFile.read(path)
    planned = jobs(cluster)
    check_budget(cluster, planned)
    text, results = _read(template, cluster), sbatch.results_folder(cluster)
    scripts = {
        results / f"nightly-{max(job.widths)}.sbatch": filled(text, cluster, job, results, share)
        for job, share in zip(planned, shares(cluster, planned), strict=True)
    }
    merging, arguments = (templates.folder() / _MERGE).read_text("utf-8"), merge_arguments(cluster, results, planned)
    scripts[results / _MERGE] = filled_merge(merging, cluster, results, arguments)
    warned, troubles = [f"warning: {line}" for line in readiness.warnings(cluster)], list[str]()
    steps = _steps(cluster, planned, scripts, results, dry_run=dry_run)
    return _noting(chain(warned, steps), troubles), troubles


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


def _steps(
    cluster: ClusterFile, planned: Sequence[Job], scripts: Mapping[Path, str], results: Path, *, dry_run: bool
) -> Iterator[str]:
    for job in planned:
        yield job.title
    yield f"{cost(cluster, planned)}; what cases cost is told by pytest --perf-dry-run"
    *paths, merging = scripts
    if dry_run:
        yield from listing(cluster)
        yield from ("", *scripts[paths[0]].splitlines())
        return
    _write(scripts, results)
    if cluster.is_local:
        yield f"results: {results}"
        yield from _noted(cluster, results, "started on this machine")
        code = sbatch.run_here([str(paths[0])])
        code = sbatch.run_here([str(merging)]) or code
        if code:
            raise ClusterError(f"{results}: the night is not green (exit code {code})")
        return
    yield from _submit(cluster, planned, paths, merging)
    yield f"results: {results}"


def _submit(cluster: ClusterFile, planned: Sequence[Job], paths: Sequence[Path], merging: Path) -> Iterator[str]:
    ids, results = list[str](), merging.parent
    try:
        for path in paths:
            ids.append(sbatch.sbatch([str(path)]))
            yield f"submitted {ids[-1]}: {path}"
        last = sbatch.sbatch([*sbatch.merge_options(cluster, ids), str(merging)])
        yield f"submitted {last}: merges their results"
        yield from _noted(cluster, results, f"submitted as {' '.join(ids)}, to be merged by {last}")
    except ClusterError as error:
        if ids:
            yield from _noted(cluster, results, f"submitted as {' '.join(ids)}, with no job that merges: {error}")
        elif isinstance(error, sbatch.RefusedError):
            shutil.rmtree(results, ignore_errors=True)  # this submission's own, and no job knows of it
        raise ClusterError(f"{error}{_left(cluster, planned, ids, results)}") from None
    except KeyboardInterrupt:
        yield f"interrupted; sbatch may have taken one more job, see squeue{_left(cluster, planned, ids, results)}"
        raise


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
        raise ClusterError(
            f"{template}: no line begins with #SBATCH; expected a script like {templates.folder()}/nightly.sbatch"
        )
    for word, what in _NEEDED.items():
        if word not in text and (word != "@budget@" or cluster.budget is not None):
            raise ClusterError(f"{template}: no {word} in it, {what}; begin with a copy of slurm/nightly.sbatch")
    return text


def _write(scripts: Mapping[Path, str], results: Path) -> None:
    where = results
    try:
        results.mkdir(parents=True)
        for where, text in scripts.items():
            write_text(where, text)
    except OSError as error:
        shutil.rmtree(results, ignore_errors=True)  # this submission's own, and nothing of it is submitted
        raise ClusterError(_not_written(where, error)) from None


def _not_written(path: Path | None, error: OSError) -> str:
    return f"{path}: not written ({error.strerror or error})"
