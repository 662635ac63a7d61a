"""The command: its options, and what it answers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pytest_llmperf.cli.answer import Answer, Screen
from pytest_llmperf.records.results_document import ResultsDocument, ResultsError, ResultsFile
from pytest_llmperf.report.exports import gitlab_metrics, junit, markdown_page, prometheus
from pytest_llmperf.report.results_json import ExportedRun
from pytest_llmperf.support.files import write_text

_FORMATS: Mapping[str, Callable[[ExportedRun], Iterable[str]]] = {
    "markdown": markdown_page,
    "gitlab": gitlab_metrics,
    "prometheus": prometheus,
    "junit": junit,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("results", metavar="RESULTS", type=Path, nargs="+", help="--perf-json files; of a case the last one's is taken")
    add("--format", choices=tuple(_FORMATS), required=True, help="docs/how-to/results.md says for which tool")
    add("--output", metavar="FILE", type=Path, help="instead of standard output; whole, or as it was before")
    parser.set_defaults(answer=_answer)


def _answer(arguments: argparse.Namespace, _screen: Screen) -> Answer:
    documents, troubles = list[ResultsDocument](), list[str]()
    for path in arguments.results:
        try:
            documents.append(ResultsFile.read(path).document)
        except ResultsError as error:  # the others are told without it
            troubles.append(str(error))
    if not documents:
        return Answer([], troubles)
    run = ExportedRun.read(documents)
    lines = list(_FORMATS[arguments.format](run))
    if arguments.output is None:
        return Answer(lines, troubles, for_programs=True)
    write_text(arguments.output, "\n".join([*lines, ""]))
    return Answer([f"{arguments.output}: {len(run.cases)} case(s), {arguments.format}"], troubles, acts=True)
