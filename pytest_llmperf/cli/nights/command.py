"""The command: its options, and what it answers."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from pytest_llmperf.cli import option_types
from pytest_llmperf.cli.answer import Answer, CommandError
from pytest_llmperf.cli.arguments import add_shared
from pytest_llmperf.cli.merge.notice import Notice
from pytest_llmperf.cli.nights import night_log
from pytest_llmperf.cli.nights.night_log import LoggedNight
from pytest_llmperf.cli.screen import Screen
from pytest_llmperf.report.text import one_line

_MOST = 20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of ``llmperf nights``."""
    add = parser.add_argument
    text = "of the nights, with nights.txt; default: %(default)s"
    add("folder", metavar="FOLDER", type=Path, nargs="?", default=Path(".llmperf/nightly"), help=text)
    text = "exit code 1 unless a night was merged within this time, green or red; for cron and monitoring, e.g. 26h"
    add("--newer-than", metavar="TIME", type=option_types.duration, help=text)
    add_shared(parser, "nights")
    parser.set_defaults(answer=_answer, usage=parser.error)


def _answer(arguments: argparse.Namespace, _screen: Screen) -> Answer:
    if arguments.mail and arguments.newer_than is None:
        arguments.usage("--mail tells of a night that is missing; expected --newer-than beside it")
    folder, hours = arguments.folder, arguments.newer_than
    file = folder / night_log.FILE
    lines, troubles, nights = list[str](), list[str](), list[LoggedNight]()
    try:
        open_nights = {standing.night.name: standing for standing in night_log.standings(file)}
        nights = night_log.read(file)
    except OSError as error:
        if hours is None:
            raise CommandError(_unread(file, error)) from None
        troubles.append(_unread(file, error))
    else:
        for night in nights[-_MOST:]:
            standing = open_nights.get(night.name)
            began = time.strftime("%Y-%m-%d %H:%M", time.localtime(night.begun))
            lines.append(f"{began}  {night.name}  {one_line(standing.words if standing else night.said)}")
    if hours is not None and not troubles:
        troubles += _missing(nights, hours)
    if troubles and arguments.mail:
        troubles += Notice(folder.name, name="llmperf nights", mail=arguments.mail).send("RED", [*troubles, "", *lines])
    return Answer(lines, troubles)


def _unread(file: Path, error: OSError) -> str:
    return f"{file}: not read ({error.strerror or error}); name the folder that [suite] results says"


def _missing(nights: Sequence[LoggedNight], hours: float) -> list[str]:
    merged = max((night.at for night in nights if night.is_merged), default=None)
    age = None if merged is None else (time.time() - merged) / 3600
    if age is not None and age <= hours:
        return []
    last = "none was ever" if age is None else f"the last was {age:.0f} h ago"
    return [f"no night was merged within {hours:g} h; {last}"]
