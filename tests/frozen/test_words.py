"""What people look up: options, commands, ini values, markers, and the names that they import."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

import pytest

import pytest_llmperf
from tests.frozen.house import main
from tests.golden import Golden
from tests.plugin.conftest import Project
from tools.documentation import reference

COMMANDS = (
    "baselines",
    *(f"baselines {name}" for name in ("list", "show")),
    *"bisect check history merge nights plan report submit tune".split(),
)
#: What the documentation and the suite import beside the names of the package itself.
MODULES = ("formulas", "ladder")


@pytest.mark.parametrize("subject", ["options", "ini", "markers", "commands", "names"])
def test_the_reference_says(golden: Golden, subject: str) -> None:
    golden.check(f"reference-{subject}.md", reference.page(subject))


@pytest.mark.skipif(sys.version_info[:2] != (3, 13), reason="argparse writes help otherwise on each Python")
def test_the_commands_help(golden: Golden, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for command in ("", *COMMANDS):
        with pytest.raises(SystemExit) as ended:
            main([*command.split(), "--help"])
        assert ended.value.code == 0
    golden.check("help-llmperf.txt", capsys.readouterr().out)


@pytest.mark.skipif(sys.version_info[:2] != (3, 13), reason="argparse writes help otherwise on each Python")
def test_pytests_help(golden: Golden, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = project.run("--help").stdout.str()
    (group,) = re.findall(r"(?ms)^LLM training performance.*?\n.*?(?=^\S)", text)
    values = re.findall(r"(?m)^  perf_\w+ .*(?:\n {4,}.*)*", text)
    golden.check("help-pytest.txt", "\n".join([group, *values]))


def test_what_users_import(golden: Golden) -> None:
    lines = [
        line for name in sorted(pytest_llmperf.__all__) for line in signatures(name, getattr(pytest_llmperf, name))
    ]
    for name in MODULES:
        module = import_module(f"pytest_llmperf.analysis.{name}")
        for own, value in sorted(vars(module).items()):
            is_ours = getattr(value, "__module__", "").startswith("pytest_llmperf.analysis") or own.isupper()
            if is_ours and not own.startswith("_"):
                lines += signatures(f"analysis.{name}.{own}", value)
    golden.check("public-names.txt", "\n".join(lines))


def signatures(name: str, value: Any) -> Iterator[str]:
    """How it is called, and what it has, a line each."""
    if not callable(value):
        yield f"{name}: {type(value).__name__}"
    elif not inspect.isclass(value):
        yield f"{name}{inspect.signature(value)}"
    else:
        yield f"{name}{inspect.signature(value.__init__)}" if is_dataclass(value) else name  # its fields
        kinds = value.__annotations__ if is_dataclass(value) else {}
        yield from (f"{name}.{own}: {kind}" for own, kind in sorted(kinds.items()))
        ours = (base for base in value.__mro__ if base.__module__.startswith("pytest_llmperf"))
        names = {own for base in ours for own in vars(base) if not own.startswith("_") and own not in kinds}
        for own in sorted(names):
            member = getattr(value, own)
            yield f"{name}.{own}{inspect.signature(member) if callable(member) else ''}"
