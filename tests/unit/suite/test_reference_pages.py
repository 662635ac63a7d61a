"""The reference's text, made from the code: all that can be given is in it, and an index's list is its contents."""

from __future__ import annotations

import argparse
import re

import pytest

from pytest_llmperf.plugin import hooks
from tests.golden import Golden
from tools.documentation import reference
from tools.documentation.contents import as_fields, contents

OWN = re.compile(r"--(?:perf-|gpus$|update-baselines)")


def test_every_option_of_the_plugin_is_there(pytestconfig: pytest.Config) -> None:
    text = reference.page("options")
    actions = pytestconfig._parser.optparser._actions
    flags = {flag for action in actions for flag in action.option_strings if OWN.match(flag)}
    assert len(flags) > 20
    assert not [flag for flag in sorted(flags) if f"`{flag}" not in text]


def test_every_ini_value_of_the_plugin_is_there(pytestconfig: pytest.Config) -> None:
    text = reference.page("ini")
    names = [name for name in pytestconfig._parser._inidict if name.startswith("perf_")]
    assert len(names) > 10
    assert not [name for name in names if f"`{name}`" not in text]


def test_every_marker_is_there() -> None:
    text = reference.page("markers")
    assert not [
        line for line in hooks.MARKERS if f"`{line.partition(': ')[0]}`\n: {line.partition(': ')[2][:8]}" not in text
    ]


def test_every_command_is_there_with_what_it_takes() -> None:
    text = reference.page("commands")
    titles = re.findall(r"(?m)^##+ `llmperf ([\w ]+)`$", text)
    assert {"baselines", "baselines show", "check", "plan", "submit", "tune"} <= set(titles)
    of_check = text.partition("## `llmperf check`")[2].partition("\n## ")[0]
    assert "`--update-baselines" in of_check
    assert "`SPEC …`" in of_check


def test_no_help_is_left_unfilled() -> None:
    assert not re.search(r"%\(|%%|==SUPPRESS==", "".join(map(reference.page, ("options", "ini", "commands"))))


def test_a_default_is_told_as_argparse_tells_it() -> None:
    assert re.search(r"per launch, and .*\(default: 1800\.0\)", reference.page("options"))


def test_what_takes_one_of_some_values_shows_them(golden: Golden) -> None:
    parser = argparse.ArgumentParser(prog="it")
    action = parser.add_argument("--format", choices=("text", "csv"), help="of what is %(prog)s")
    assert reference._argument(action) == "`--format text|csv`"
    golden(reference._expanded(action, parser))


def test_an_unknown_subject_is_an_error() -> None:
    with pytest.raises(KeyError):
        reference.page("optoins")


def test_the_list_of_an_index_is_its_contents() -> None:
    text = "# How-to\n\n- [One](one.md): first\n- [Two](two/index.md)\n- [Elsewhere](../three.md)\n- no link\n"
    assert contents("how-to/index", text).split() == ["```{toctree}", ":hidden:", "one", "two/index", "```"]


def test_no_other_page_has_contents() -> None:
    assert contents("how-to/one", "- [One](one.md)") == ""
    assert contents("index", "no list") == ""


def test_what_a_docstring_says_of_errors_is_a_field() -> None:
    lines = [
        "One line: with a colon.",
        "",
        "Raises:",
        "    SpecError: it cannot be,",
        "        in one line.",
        "",
        "More.",
    ]
    expected = ["One line: with a colon.", "", ":raises SpecError: it cannot be,", "        in one line.", "", "More."]
    assert as_fields(lines) == expected
