"""One night from the command line: its jobs submitted, its results merged; lines for whoever asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pytest_llmperf.cli import submit
from pytest_llmperf.cli.clusterfile import ClusterError, ClusterFile
from pytest_llmperf.cli.jobs import Job, check_budget, cost, jobs, shares
from pytest_llmperf.cli.merge import Night
from pytest_llmperf.cli.script import filled
from pytest_llmperf.report.results_json import write_json


def submitted(path: Path, template: Path, *, dry_run: bool) -> tuple[list[str], list[str]]:
    """Submit what the cluster file at ``path`` says: what was done, and what went wrong after that.

    Raises:
        ClusterError: the file or the budget says no; nothing was submitted.
    """
    cluster = ClusterFile.read(path)
    planned = jobs(cluster)
    check_budget(cluster, planned)
    try:
        text = template.read_text(encoding="utf-8")
    except OSError as error:
        raise ClusterError(f"{template}: not read ({error}); name the nightly script with --script") from None
    results = submit.results_folder(cluster)
    scripts = [
        filled(text, cluster, job, results, share) for job, share in zip(planned, shares(cluster, planned), strict=True)
    ]
    lines: list[str] = []
    try:
        lines.extend(_submitted(cluster, planned, scripts, results, dry_run=dry_run))
    except ClusterError as error:
        return lines, [str(error)]
    return lines, []


def merged(night: Night, json_file: Path | None, markdown_file: Path | None) -> list[str]:
    """Write the files that were asked for; the page as lines.

    Raises:
        OSError: one cannot be written.
    """
    page = night.page()
    if json_file is not None:
        write_json(json_file, night.document())
    if markdown_file is not None:
        markdown_file.write_text("\n".join([*page, ""]), encoding="utf-8")
    return page


def _submitted(
    cluster: ClusterFile, planned: list[Job], scripts: list[str], results: Path, *, dry_run: bool
) -> Iterator[str]:
    for job in planned:
        yield job.title
    yield f"{cost(cluster, planned)}; what cases cost is told by pytest --perf-dry-run"
    if dry_run:
        yield from ("", *"".join(scripts[:1]).splitlines())
        return
    results.mkdir(parents=True)
    paths = [results / f"nightly-{max(job.widths)}.sbatch" for job in planned]
    for path, text in zip(paths, scripts, strict=True):
        path.write_text(text, encoding="utf-8")
    if cluster.is_local:
        code = submit.run_here(paths[0])
        yield f"results: {results}"
        if code:
            raise ClusterError(f"{paths[0]}: ended with exit code {code}")
        return
    ids = []
    for path in paths:
        ids.append(submit.sbatch([str(path)]))
        yield f"submitted {ids[-1]}: {path}"
    try:
        yield f"submitted {submit.sbatch(submit.merge_words(cluster, ids, results, planned))}: merges their results"
    except ClusterError as error:
        line = submit.merge_line(cluster, results, planned)
        raise ClusterError(f"{error}; the jobs run all the same, merge their results with: {line}") from None
    yield f"results: {results}"
