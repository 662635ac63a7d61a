"""The command: arguments in, lines printed, an exit code out. All that prints is here."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Generator, Sequence

from pytest_llmperf.cli.answer import Answer, CommandError, Screen, arguments_parser
from pytest_llmperf.judge.store import BaselineError
from pytest_llmperf.report.text import fold, glyphs_of, leaving, one_line
from pytest_llmperf.support import interpreter
from pytest_llmperf.support.redaction import without_secrets


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 is fine, 1 is no baselines, no such case or a broken file, and argparse exits with 2."""
    ended_by: list[str] = []
    restore = interpreter.end_on((*interpreter.OF_A_HOST, signal.SIGHUP), ended_by.append)
    try:
        try:
            return _run(argv)
        finally:
            print(end="", flush=True)
    except BrokenPipeError:  # whoever reads has seen enough
        _discard_output()
        return 0
    except KeyboardInterrupt:
        return 128 + signal.Signals["".join(ended_by) or "SIGINT"]  # as shells say it
    except OSError as error:  # a full disk, a folder that may not be read
        _discard_output()
        print(f"llmperf: {one_line(_words(error))}", file=sys.stderr)
        return 1
    finally:
        restore()


def _words(error: OSError) -> str:
    """Which file, and what was wrong with it; without the number of the error."""
    if not error.strerror:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def _discard_output() -> None:
    # Python flushes standard output once more at its end, and would complain of it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _run(argv: Sequence[str] | None) -> int:
    arguments = _arguments(argv)
    screen = _screen()
    try:
        answer: Answer = arguments.answer(arguments, screen)
    except (BaselineError, CommandError) as error:
        answer = Answer([], str(error).splitlines())
    try:
        lost = _print(answer, screen)
    except KeyboardInterrupt:  # what was found until then is said
        _tell(answer.troubles)
        raise
    _tell([*answer.troubles, *lost])
    return 1 if answer.troubles or lost else 0


def _tell(troubles: Sequence[str]) -> None:
    for line in troubles:
        print(f"llmperf: {one_line(line)}", file=sys.stderr)


def _print(answer: Answer, screen: Screen) -> list[str]:
    """Print its lines to their end; why some were lost."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # there is no standard output after >&-
    width, lost, lines = None if answer.for_programs else screen.width, list[str](), iter(answer.lines)
    try:
        for line in lines:
            told = without_secrets(line) if answer.for_programs else leaving(line)
            for part in fold(told, width, indent="    ") or [""]:
                try:
                    # At once: a prediction takes seconds, and whoever reads may have seen enough.
                    print(part.encode(encoding, "backslashreplace").decode(encoding), flush=True)
                except OSError as error:
                    if not answer.acts:
                        raise
                    _discard_output()
                    lost = [] if isinstance(error, BrokenPipeError) else [f"its output was lost: {_words(error)}"]
    finally:
        if isinstance(lines, Generator):
            lines.close()  # where Ctrl-C came while a line was printed, a run still has its end
    return lost


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """As argparse has them, with words behind options too, as ``later_words``: ``check model=a --gpus 1 liger=1``."""
    parser = arguments_parser()
    arguments: argparse.Namespace
    arguments, rest = parser.parse_known_args(argv)
    name = getattr(arguments, "later_words", "specs")
    if rest and hasattr(arguments, name) and not any(word.startswith("-") for word in rest):
        setattr(arguments, name, [*getattr(arguments, name), *rest])
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}{arguments.parser.meant(rest)}")
    return arguments


def _screen() -> Screen:
    # A pipe or a file gets lines as long as they are: one case, one line.
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else None
    return Screen(width, glyphs_of(getattr(sys.stdout, "encoding", None)))
