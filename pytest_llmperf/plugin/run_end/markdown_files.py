"""The run's page of Markdown: where ``--perf-markdown`` says, and in the summary of a step of GitHub Actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_llmperf.plugin.run_end.trouble import Trouble
from pytest_llmperf.report.consumers.documents import markdown_page, within
from pytest_llmperf.report.consumers.exported_run import ExportedRun
from pytest_llmperf.run.settings import Settings
from pytest_llmperf.support.files import write_text

# GitHub refuses the whole summary of a step that is larger than a MiB, also what others wrote into it.
_MOST_BYTES = 2**20


def write(
    settings: Settings, document: Mapping[str, Any], troubles: Sequence[Trouble]
) -> tuple[list[Trouble], list[str]]:
    """Of what ``--perf-json`` says of the run: what could not be written, if that was asked for, and else a line."""
    told = [line for trouble in troubles for line in trouble.lines]
    run = ExportedRun.read([{**document, "troubles": told}])
    page = markdown_page(run)
    unwritten = list[Trouble]()
    if settings.markdown is not None:
        try:
            write_text(settings.markdown, "\n".join([*page, ""]))
        except OSError as error:
            line = f"--perf-markdown {settings.markdown}: not written ({error})"
            unwritten.append(Trouble("--perf-markdown", [line]))
    if settings.step_summary is None or settings.dry_run or not (run.cases or run.skipped or run.troubles):
        return unwritten, []
    try:
        return unwritten, _append(settings.step_summary, page)
    except OSError as error:  # nobody asked for it: no reason for a run to fail
        return unwritten, [f"GITHUB_STEP_SUMMARY {settings.step_summary}: not written ({error})"]


def _append(path: Path, page: Sequence[str]) -> list[str]:
    size = path.stat().st_size if path.exists() else 0
    text = within(["", *page] if size else page, _MOST_BYTES - size)
    if not text:
        return [f"GITHUB_STEP_SUMMARY {path}: not written, it has {size} bytes already, and may have {_MOST_BYTES}"]
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    return []
