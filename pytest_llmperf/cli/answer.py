"""What `llmperf` can be asked, options that several commands have, what a command answers, and all that prints it."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from pytest_llmperf.judge.store import BaselineError
from pytest_llmperf.report.text import FORMATS, Column, fold, leaving, one_line, render
from pytest_llmperf.run.options import STORED, Settings, add_to_command, instead, meant
from pytest_llmperf.run.options import table as options_of
from pytest_llmperf.support import MADE_BY, formats, interpreter, user_input
from pytest_llmperf.support.files import shipped
from pytest_llmperf.support.redaction import without_secrets

#: Of a spec. Fewer digits are as likely a word.
DIGEST = re.compile(r"[0-9a-f]{6,16}")


@dataclass(frozen=True)
class Answer:
    lines: Iterable[str]
    troubles: Sequence[str] = ()
    """For standard error, a line each; one is enough for exit code 1. Lines that take their time may add to it."""
    for_programs: bool = False
    """Whether its lines are a format that no terminal's width may break."""
    acts: bool = False
    """Whether its lines tell of what is done meanwhile: that goes on to its end, read or not."""


class CommandError(Exception):
    """Who, what, what was expected and what to do, a line each; the command ends with exit code 1."""


class CaseError(CommandError):
    """No baselines, or no such case: one line with who, what was expected, the nearest known name and what to do."""


class NotStoredError(CaseError):
    """Nothing of that name is stored, or nothing at all: what its settings name can do without."""


class ClusterError(CommandError):
    """A cluster file that cannot serve: one line with the file, what is wrong and what was expected."""


@dataclass(frozen=True)
class Screen:
    """Where lines go: how wide it is; ``None`` for a file or a pipe."""

    width: int | None


def table(columns: Sequence[Column], screen: Screen) -> list[str]:
    return render(columns, screen.width, color=False)


def facts(values: Mapping[str, object]) -> list[str]:
    width = max(map(len, values), default=0)
    return [f"  {plain(name):{width}}  {plain(value) or formats.ABSENT}" for name, value in values.items()]


def plain(value: object) -> str:
    """What a file says, as one line: whatever its type, it moves no cursor."""
    return one_line(str(value))


#: Each is answered by its module in ``commands``, but for those that share one.
_HOMES = {
    "merge": "commands.submit:add_merge_options",
    "scale": "commands.plan:add_scale_options",
    "nights": "commands.submit:add_nights_options",
}
#: What commands, and those of their options that are no run's settings, say of themselves.
WORDS = shipped(__file__, "commands.ini")

# Options of several commands.
_OF_COMMANDS: Mapping[str, Mapping[str, Any]] = {
    "--json": {"action": "store_true"},
    "--format": {"choices": FORMATS},
    "--minutes": {"type": user_input.argument(user_input.minutes, user_input.A_TIME), "metavar": "M"},
}


class CommandParser(argparse.ArgumentParser):
    """That of one command; ``options`` names the function that adds its own: who calls one loads no other."""

    def __init__(self, *, options: str = "", **words: Any) -> None:
        super().__init__(**words)
        self._options = options
        self.set_defaults(parser=self, usage=self.error)

    def read_options(self) -> None:
        if self._options:
            add_options, self._options = resolve_name(self._options), ""
            add_options(self)

    def parse_known_args(self, *args: Any, **others: Any) -> Any:
        self.read_options()
        return super().parse_known_args(*args, **others)

    def _add_action(self, action: Any) -> Any:
        name, own = [*action.option_strings, action.dest][0], self.prog.partition(" ")[2]
        if action.help is None:
            action.help = WORDS.get(own, name, fallback=WORDS["all"].get(name))
        return super()._add_action(action)

    def meant(self, unknown: Sequence[str]) -> str:
        return meant(unknown, self._option_string_actions, self.prog.partition(" ")[2])

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # As argparse does it, which on older Pythons suggests nothing.
        if action.choices is not None and value not in action.choices:
            names = list(map(str, action.choices))
            known = f"(choose from {', '.join(map(repr, names))})"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r} {known}{instead(str(value), names)}")


def arguments_parser() -> CommandParser:
    """Its namespace has ``answer``, what gives it, and often ``usage``: what was given may still be no use together."""
    parser = CommandParser(prog="llmperf", description="Look into what pytest-llmperf keeps.")
    parser.add_argument("--version", action="version", version=MADE_BY)
    rooms = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, what in WORDS["llmperf"].items():
        description = what if name != "baselines" else None  # its own commands have one each
        home = _HOMES.get(name, f"commands.{name}:add_options")
        rooms.add_parser(name, help=what, description=description, options=f"pytest_llmperf.cli.{home}")
    return parser


def add_shared(parser: argparse.ArgumentParser, front: str) -> None:
    add_to_command(parser, (one for _, one in options_of(Settings)), front)
    parser.set_defaults(front=front)


def add_option(parser: Any, flag: str, **words: Any) -> None:
    """Add one that other commands have too, to a parser or a group of it; ``words``: what it has beside that."""
    parser.add_argument(flag, **{**_OF_COMMANDS[flag], **words})


def add_place(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, STORED)


# The command: arguments in, lines printed, an exit code out.


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
        is_cut = getattr(arguments, "script", None) and " " not in arguments.script  # by the shell, without quotes
        what = "; quote the whole command of --script" if is_cut else arguments.parser.meant(rest)
        parser.error(f"unrecognized arguments: {' '.join(rest)}{what}")
    return arguments


def _screen() -> Screen:
    # A pipe or a file gets lines as long as they are: one case, one line.
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return Screen(shutil.get_terminal_size().columns if is_terminal else None)
