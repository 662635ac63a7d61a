"""``llmperf merge``: the results of a night as one document and one page, and a notice of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from pytest_llmperf.cli.answer import Answer, Screen
from pytest_llmperf.cli.arguments import add_shared
from pytest_llmperf.cli.night.night_log import Notice
from pytest_llmperf.cli.night.night_results import gather
from pytest_llmperf.cli.night.unjudged import left_out
from pytest_llmperf.report.results_json import write_json
from pytest_llmperf.support.files import write_text


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("results", metavar="DIR|FILE", type=Path, nargs="+", help="gpus-*.json of a folder, or files")
    add("--expect", metavar="NAME", action="append", default=[], help="a file that must be in the folder")
    text = "tests of so many GPUs are not missed; wider: of more than the night has"
    add("--without", metavar="N|wider", action="append", default=[], help=text)
    add("--json", metavar="FILE", type=Path)
    add("--markdown", metavar="FILE", type=Path)
    text = "add a line to this file; inside of a SLURM job, make it the job's comment too"
    add("--nights", metavar="FILE", type=Path, help=text)
    add_shared(parser, "merge")
    add("--name", default="llmperf-nightly", help="of the night, for the mail's subject; default: %(default)s")
    parser.set_defaults(answer=_answer, usage=parser.error)


def _answer(arguments: argparse.Namespace, _screen: Screen) -> Answer:
    without = left_out(arguments.without)
    if without is None:
        arguments.usage(f"--without {' '.join(arguments.without)}: expected numbers of GPUs, or the word wider")
    night = gather(arguments.results, arguments.expect, without)
    page, unwritten = night.page(), list[str]()
    writers: list[tuple[Path | None, Callable[[Path], None]]] = [
        (arguments.json, lambda path: write_json(path, night.document())),
        (arguments.markdown, lambda path: write_text(path, "\n".join([*page, ""]))),
    ]
    for path, write in writers:
        try:
            if path is not None:
                write(path)
        except OSError as error:
            unwritten.append(f"{path}: not written ({error.strerror or error})")
    notice = Notice(arguments.results[0].name, name=arguments.name, mail=arguments.mail, nights=arguments.nights)
    # A failed report fails the command: somebody waits for word of a green night, too.
    unreported = notice.tell(night.headline, page, unwritten, night.troubles)
    return Answer(page, [*night.troubles, *unwritten, *unreported], acts=True)
