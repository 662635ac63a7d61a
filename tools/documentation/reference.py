"""The reference pages' text, as MyST, from the code itself: options, ini values, markers, commands, public names."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from _pytest.config.argparsing import (
    Parser,
)  # pytest makes them itself, and has no public way to ask one of its plugins

import pytest_llmperf
from pytest_llmperf.cli.answer import CommandParser, arguments_parser
from pytest_llmperf.plugin import hooks
from pytest_llmperf.plugin.hooks import add_options

#: What stands for an argument that argparse leaves out of its help.
_HIDDEN = argparse.SUPPRESS


def page(subject: str) -> str:
    """The text of one subject.

    Raises:
        KeyError: there is none of that name.
    """
    return "\n".join(_SUBJECTS[subject]()) + "\n"


def plugin_parser() -> pytest.Parser:
    """A parser that has this plugin's options and ini values, and no others."""
    parser = Parser(_ispytest=True)
    add_options(parser)
    return parser


def pytest_options() -> Iterator[str]:
    """Each option that the plugin adds to pytest."""
    group = plugin_parser().getgroup("llmperf")
    for option in group.options:
        names, words = option.names(), option.attrs()
        yield from _entry([_flag(names, words)], str(words["help"]), words)


def ini_values() -> Iterator[str]:
    """Each value that the plugin reads from pytest's ini file."""
    parser: Any = plugin_parser()
    for name, (text, kind, default) in parser._inidict.items():
        given = {"default": default} if default not in ("", None, False, []) else {}
        of_kind = f" ({kind})" if kind not in (None, "string") else ""
        yield from _entry([f"`{name}`{of_kind}"], f"{text}{_default(text, given)}", {})


def markers() -> Iterator[str]:
    """Each marker that the plugin registers."""
    for line in hooks.MARKERS:
        name, _, text = line.partition(": ")
        yield from _entry([f"`{name}`"], text, {})


def commands() -> Iterator[str]:
    """Each command of ``llmperf``, and what it takes."""
    yield from _command(arguments_parser(), depth=2)


def _command(parser: CommandParser, depth: int) -> Iterator[str]:
    parser.read_options()
    below = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    for choice in below:
        help_of = {each.dest: each.help for each in choice._choices_actions}
        for name, command in choice.choices.items():
            yield from (f"{'#' * depth} `{command.prog}`", "")
            command.read_options()
            yield from (f"{_sentence(help_of.get(name) or '')}", "")
            if not any(isinstance(each, argparse._SubParsersAction) for each in command._actions):
                yield from (f"`{_usage(command)}`", "")
            yield from _command(command, depth + 1)
    if not below:
        for action in parser._actions:
            if action.help != _HIDDEN and not isinstance(action, argparse._HelpAction):
                yield from _entry([_argument(action)], _expanded(action, parser), {})


def _usage(parser: argparse.ArgumentParser) -> str:
    words = [_bracketed(each) for each in parser._actions if each.help != _HIDDEN]
    return " ".join([parser.prog, *(word for word in words if word != "[-h]")])


def _bracketed(action: argparse.Action) -> str:
    text = _argument(action).strip("`").split(", ")[0].replace("`", "")
    return text if action.required or (not action.option_strings and action.nargs != "?") else f"[{text}]"


def _argument(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else _value(action)
    many = " …" if action.nargs in ("*", "+") else ""
    if not action.option_strings:
        return f"`{value}{many}`"
    return ", ".join(f"`{name}{' ' + value if value else ''}{many}`" for name in action.option_strings)


def _value(action: argparse.Action) -> str:
    if action.metavar:
        return action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)
    if action.choices:
        return "|".join(map(str, action.choices))
    return action.dest.upper() if action.option_strings else action.dest


def _expanded(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    return (action.help or "") % {**vars(action), "prog": parser.prog}


def _flag(names: Iterable[str], words: dict[str, Any]) -> str:
    value = words.get("metavar") or "|".join(map(str, words.get("choices") or ()))
    return ", ".join(f"`{name} {value}`" if value else f"`{name}`" for name in names)


def _default(text: str, words: dict[str, Any]) -> str:
    return f" (default: {words['default']})" if "default" in words and "(" not in text else ""


def _entry(terms: Iterable[str], text: str, words: dict[str, Any]) -> Iterator[str]:
    """A term and its meaning: narrower than a table's row, so it can be read on a phone."""
    yield from (*terms, f": {_sentence(text.replace('%(default)s', str(words.get('default', ''))))}", "")


def _sentence(text: str) -> str:
    # Flags are code, so that nothing makes a dash of two hyphens.
    return re.sub(r"(?<![`\w-])(--[a-z][\w-]*(?:=[\w.]+)?)", r"`\1`", " ".join(text.split()))


def names() -> Iterator[str]:
    """Each name of ``pytest_llmperf``, by its docstring."""
    for name in sorted(pytest_llmperf.__all__, key=str.lower):
        found = getattr(pytest_llmperf, name)
        kind = "autoclass" if inspect.isclass(found) else "autofunction" if callable(found) else "autodata"
        # What is said of a constant stands where it is made, and nothing else knows it.
        home = f"pytest_llmperf.{pytest_llmperf._HOMES[name]}" if kind == "autodata" else "pytest_llmperf"
        yield from (f"## `{name}`", "", "```{eval-rst}", f".. {kind}:: {home}.{name}")
        if kind == "autoclass":
            yield from ("   :members:", "   :exclude-members: __new__, __init__")
        yield from ("```", "")


_SUBJECTS = {
    "options": pytest_options,
    "ini": ini_values,
    "markers": markers,
    "commands": commands,
    "names": names,
}
