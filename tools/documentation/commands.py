"""Whether a command that the documentation names can be given: its options exist, and its files are there."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields

import pytest

from pytest_llmperf.cli.answer import arguments_parser
from pytest_llmperf.settings.train_spec import TrainSpec
from tools.documentation.blocks import REPOSITORY

#: Programs of others, which are only named.
_OTHERS = frozenset(
    "gh git sed salloc scontrol sacct tail cat echo cd exit export sleep crontab torchfrtrace command".split()
)
_ENDS = frozenset(("&&", "||", "|", ";", "&", ">", ">>", "2>&1", "<"))
_INCOMPLETE = re.compile(r"(is|are) required|expected (one|at least one) argument|invalid choice: 'COMMAND'")
_SETTING = re.compile(r"[A-Z_]+=.*", re.DOTALL)
_FIELD = re.compile(r"([a-z_]\w*)=")
_FIELDS = frozenset(field.name for field in fields(TrainSpec))


def troubles(line: str, parser: pytest.Parser, *, is_named: bool = False) -> Iterator[str]:
    """What is wrong with each command of a shell's line; ``parser`` has pytest's options, the plugin's among them.

    A sentence may name a command without all that it needs (``is_named``).
    """
    for words in _commands(line):
        trouble = _trouble(words, parser)
        if trouble and not (is_named and _INCOMPLETE.search(trouble)):
            yield f"{' '.join(words)}: {trouble}"


def _commands(line: str) -> Iterator[list[str]]:
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words = list(lexer)
    except ValueError as error:
        raise ValueError(f"{line}: {error}") from None
    found: list[str] = []
    skip = False
    for word in [*words, ";"]:
        if word in _ENDS:
            if found:
                yield found
            found, skip = [], word in (">", ">>", "<")
        elif skip:
            skip = False
        elif found or not _SETTING.fullmatch(word):
            found.append(word)


def _trouble(words: list[str], parser: pytest.Parser) -> str:  # noqa: PLR0911 - one for each program
    match words:
        case ["pytest", *rest] | ["python", "-m", "pytest", *rest]:
            return _pytest(rest, parser)
        case [program, *rest] if program.rpartition("/")[2] == "llmperf":
            return _llmperf(rest)
        case ["python", "-m", str(module), *rest] if module.startswith("tools"):
            return _tool(module.replace(".", "/"), rest)
        case ["python", "train.py", *_]:  # a reader's own
            return ""
        case ["python", str(script), *rest] if script.startswith("tools/"):
            return _tool(script.removesuffix(".py"), rest)
        case ["make", *rest]:
            return _make(rest)
        case ["pip", "install", *rest]:
            return _pip(rest)
        case [program, *_] if program.rpartition("/")[2] in _OTHERS or program.startswith(("[", "code=", "pre-commit")):
            return ""
    return "a program that nobody here knows; tools/documentation/commands.py says which are"


def _pytest(words: list[str], parser: pytest.Parser) -> str:
    try:
        known, unknown = parser.parse_known_and_unknown_args(words)
    except pytest.UsageError as error:
        return str(error)
    options = [word for word in unknown if word.startswith("-")]
    if options:
        return f"pytest has no {options[0]}"
    for path in (str(each).partition("::")[0] for each in known.file_or_dir):
        if path.startswith(("perf_tests", "tests")) and not (REPOSITORY / path).exists() and "mine" not in path:
            return f"there is no {path}"
    return ""


def _llmperf(words: list[str]) -> str:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            arguments_parser().parse_args(words)
    except SystemExit as end:
        if end.code:
            return printed.getvalue().strip().splitlines()[-1]
    named = [match[1] for word in words if (match := _FIELD.match(word))]
    unknown = [name for name in named if name not in _FIELDS]
    return f"TrainSpec has no {unknown[0]}" if unknown and words[0] in ("check", "plan", "tune") else ""


def _tool(path: str, words: list[str]) -> str:
    file = REPOSITORY / f"{path}.py"
    if not file.exists():
        file = REPOSITORY / path / "__main__.py"
    if not file.exists():
        return f"there is no {path}.py"
    text = file.read_text(encoding="utf-8")
    missing = [word for word in words if word.startswith("--") and f'"{word.partition("=")[0]}"' not in text]
    if missing:
        return f"{path}.py has no {missing[0]}"
    return next(
        (f"there is no {word}" for word in words if word.startswith(("docs/", "baselines/")) and not _is_there(word)),
        "",
    )


def _is_there(path: str) -> bool:
    return any(REPOSITORY.glob(path)) if "*" in path else (REPOSITORY / path).exists()


def _make(words: list[str]) -> str:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = [word for word in words if "=" not in word]
    return next((f"make has no {each}" for each in targets if not re.search(rf"(?m)^{each}:", makefile)), "")


def _pip(words: list[str]) -> str:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    for extras in re.findall(r"\[([\w,-]+)\]", " ".join(words)):
        for extra in extras.split(","):
            if not re.search(rf"(?m)^{extra} = \[", project):
                return f"there is no extra {extra}"
    return ""
