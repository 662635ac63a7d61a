"""What tests hold of the words that users read: a golden has them whole, and an assert has a word or two."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.golden import sections

TESTS = Path(__file__).parents[2]

#: So many asserts may hold a text of so many words. The number only falls.
MOST_ASSERTS, FEWEST_WORDS = 180, 4

_ASKED = ("fnmatch_lines", "match", "raises", "search")


def texts(node: ast.AST) -> Iterator[str]:
    """The strings in it; an f-string as one."""
    match node:
        case ast.JoinedStr(values=values):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else " … " for part in values)
        case ast.Constant(value=str(text)):
            yield text
        case _:
            for child in ast.iter_child_nodes(node):
                yield from texts(child)


def is_prose(text: str) -> bool:
    return sum(1 for word in text.split() if re.search(r"[A-Za-z]", word)) >= FEWEST_WORDS


def asserts(tree: ast.AST) -> Iterator[ast.AST]:
    """What holds a text: an assert, or a pattern that an error's message or printed lines are matched with."""
    for node in ast.walk(tree):
        match node:
            case ast.Assert(test=test) if any(map(is_prose, texts(test))):
                yield node
            case ast.Call(func=ast.Attribute(attr=name)) if name in _ASKED and any(map(is_prose, texts(node))):
                yield node


def test_few_asserts_hold_sentences() -> None:
    found = Counter(
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("*.py")
        for _ in asserts(ast.parse(path.read_text(encoding="utf-8")))
    )
    assert found.total() <= MOST_ASSERTS, (
        f"{found.total()} asserts hold texts of {FEWEST_WORDS} words or more, at most {MOST_ASSERTS} may: take the "
        f"fixture `golden` and call golden(output), or assert a field or a word or two (CONTRIBUTING.md); most are in "
        f"{', '.join(f'{name} ({number})' for name, number in found.most_common(5))}"
    )


@pytest.mark.parametrize("path", sorted(TESTS.rglob("golden/test_*.txt")), ids=lambda path: path.stem)
def test_each_golden_has_its_test(path: Path) -> None:
    module = path.parents[1] / f"{path.stem}.py"
    functions = [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.FunctionDef)]
    names = {each.name for each in functions if "golden" in [argument.arg for argument in each.args.args]}
    assert {re.split(r"[\[ ]", name)[0].split("::")[-1] for name in sections(path)} <= names
