"""The command: its options, and what it answers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pytest_llmperf.cli.answer import Answer
from pytest_llmperf.cli.export import event_files
from pytest_llmperf.cli.export.results_documents import read_documents
from pytest_llmperf.cli.screen import Screen
from pytest_llmperf.report.consumers.bencher import bencher
from pytest_llmperf.report.consumers.direction import DIRECTIONS
from pytest_llmperf.report.consumers.exported_run import ExportedRun
from pytest_llmperf.report.consumers.github_benchmark import github_benchmark
from pytest_llmperf.report.consumers.gitlab_metrics import gitlab_metrics
from pytest_llmperf.report.consumers.junit import junit
from pytest_llmperf.report.consumers.markdown_page import markdown_page
from pytest_llmperf.report.consumers.prometheus import prometheus
from pytest_llmperf.report.consumers.tensorboard import event_points
from pytest_llmperf.support.files import write_text

_GITHUB_BENCHMARK, _TENSORBOARD = "github-benchmark", "tensorboard"
# Of the others too, but these refuse a text in which there is nothing.
_OF_FIGURES = ("bencher", _GITHUB_BENCHMARK)

_FORMATS: Mapping[str, Callable[[ExportedRun], Iterable[str]]] = {
    "markdown": markdown_page,
    "gitlab": gitlab_metrics,
    "bencher": bencher,
    "prometheus": prometheus,
    "junit": junit,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of ``llmperf export``."""
    add = parser.add_argument
    add("results", metavar="RESULTS", type=Path, nargs="+", help="--perf-json files; of a case the last one's is taken")
    add(
        "--format",
        choices=(*_FORMATS, _GITHUB_BENCHMARK, _TENSORBOARD),
        required=True,
        help="docs/how-to/results.md says for which tool",
    )
    text = f"for {_GITHUB_BENCHMARK}: metrics of which more is better, or less (default: bigger)"
    add("--better", choices=tuple(DIRECTIONS), help=text)
    text = f"instead of standard output; whole, or as it was before. For {_TENSORBOARD} its log folder"
    add("--output", metavar="FILE", type=Path, help=text)
    parser.set_defaults(answer=_answer, usage=parser.error)


def _answer(arguments: argparse.Namespace, _screen: Screen) -> Answer:
    if arguments.better and arguments.format != _GITHUB_BENCHMARK:
        arguments.usage(f"--better says nothing to --format {arguments.format}; it goes with {_GITHUB_BENCHMARK}")
    if arguments.format == _TENSORBOARD:
        _refuse_events(arguments)
    documents, troubles = read_documents(arguments.results)
    if not documents:
        return Answer([], troubles)
    run = ExportedRun.read(documents)
    if arguments.format == _TENSORBOARD:
        return _written(run, arguments.output, troubles)
    if arguments.format == _GITHUB_BENCHMARK:
        lines = list(github_benchmark(run, arguments.better or "bigger"))
    else:
        lines = list(_FORMATS[arguments.format](run))
    if arguments.format in _OF_FIGURES and lines in (["{}"], ["[]"]):
        troubles.append(f"--format {arguments.format}: no case has a figure that can be trusted, so the text is empty")
    if arguments.output is None:
        return Answer(lines, troubles, for_programs=True)
    write_text(arguments.output, "\n".join([*lines, ""]))
    return Answer([f"{arguments.output}: {len(run.cases)} case(s), {arguments.format}"], troubles, acts=True)


def _refuse_events(arguments: argparse.Namespace) -> None:
    output: Path | None = arguments.output
    if output is None or (output.exists() and not output.is_dir()):
        arguments.usage(f"--format {_TENSORBOARD} writes files into a folder: name it with --output FOLDER")
    if why := event_files.missing():
        arguments.usage(why)


def _written(run: ExportedRun, folder: Path, troubles: list[str]) -> Answer:
    points = list(event_points(run))
    event_files.write_points(folder, points)
    left = len(run.cases) - len(points)
    if left:
        troubles.append(
            f"--format {_TENSORBOARD}: {left} case(s) left out: no launch, or no figure that can be trusted"
        )
    return Answer([f"{folder}: {len(points)} case(s), {_TENSORBOARD}"], troubles, acts=True)
