"""``llmperf nights``: each night of a folder on a line."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

from pytest_llmperf.cli.answer import Answer, CommandError, Screen
from pytest_llmperf.cli.arguments import add_shared
from pytest_llmperf.cli.night import night_log
from pytest_llmperf.cli.night.night_log import Notice
from pytest_llmperf.report.text import one_line
from pytest_llmperf.support import user_input

_MOST = 20


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "of the nights, with nights.txt; default: %(default)s"
    add("folder", metavar="FOLDER", type=Path, nargs="?", default=Path(".llmperf/nightly"), help=text)
    text = "exit code 1 unless a night was merged within this time, green or red; for cron and monitoring, e.g. 26h"
    time_above_0 = user_input.argument(user_input.duration_hours, "a time above 0, e.g. 24h, 2d, 1d12h or 90m")
    add("--newer-than", metavar="TIME", type=time_above_0, help=text)
    add_shared(parser, "nights")
    parser.set_defaults(answer=_answer, usage=parser.error)


def _answer(arguments: argparse.Namespace, _screen: Screen) -> Answer:
    if arguments.mail and arguments.newer_than is None:
        arguments.usage("--mail tells of a night that is missing; expected --newer-than beside it")
    folder, hours = arguments.folder, arguments.newer_than
    file = folder / night_log.NIGHTS_FILE
    lines, troubles = list[str](), list[str]()
    try:
        open_nights = {night.name: words for night, words in night_log.standings(file)}
        nights = night_log.read(file)
    except OSError as error:
        why = f"{file}: not read ({error.strerror or error}); name the folder that [suite] results says"
        if hours is None:
            raise CommandError(why) from None
        troubles.append(why)
    else:
        for night in nights[-_MOST:]:
            began = time.strftime("%Y-%m-%d %H:%M", time.localtime(night.begun))
            lines.append(f"{began}  {night.name}  {one_line(open_nights.get(night.name, night.said))}")
        merged = max((night.at for night in nights if night.is_merged), default=None)
        age = math.inf if merged is None else (time.time() - merged) / 3600
        if hours is not None and age > hours:
            last = "none was ever" if merged is None else f"the last was {age:.0f} h ago"
            troubles.append(f"no night was merged within {hours:g} h; {last}")
    if troubles and arguments.mail:
        notice = Notice(folder.name, name="llmperf nights", mail=arguments.mail)
        troubles += notice.send("RED", [*troubles, "", *lines])
    return Answer(lines, troubles)
