"""Which files name a vendor's GPU software: one of the launcher, one of a rank, and those that are listed here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import pytest_llmperf

_PACKAGE = Path(pytest_llmperf.__file__).parent
_VENDORS = re.compile(r"cuda|nccl|nvml", re.IGNORECASE)

#: Another vendor's GPUs are one more of each.
DEVICES = {"launch/device.py", "observe/device.py"}

#: Why each of the others may; what they say is data, or the subject of the whole file.
EXCEPTIONS = {
    "worker/warm/gpu_answers.py": "asks the driver before torch is imported, in a process that must never wake a GPU",
    "settings/compilation.py": "a mode of torch.compile, by torch's own word",
    "worker/settings/compilation.py": "the same mode, as its compiler was given it",
    "records/launch.py": "beginnings of variables of exchanges, which are no difference of one rank",
    "run/history_store.py": "names of versions in stored results",
    "analysis/likely_causes.py": "patterns for names of kernels and libraries in stored traces",
    "analysis/step_difference.py": "patterns for names of variables, versions and kernels in records",
    "analysis/formulas.py": "a formula of the chapter that says whose buffers it leaves out",
    "settings/attention.py": "advice that names torch's own functions",
    "observe/places.py": "names of a tensor's own methods",
    "worker/script/torch_hooks.py": "functions of torch that it hooks, by torch's own names",
}


def _named(source: str) -> Iterator[str]:
    """The strings and identifiers of ``source`` that name one, but for docstrings."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        words: list[object] = [getattr(node, name, None) for name in ("id", "attr", "arg", "name", "asname", "module")]
        if isinstance(node, ast.Constant) and id(node) not in docstrings:
            words.append(node.value)
        yield from (word for word in words if isinstance(word, str) and _VENDORS.search(word))


def _files() -> dict[str, list[str]]:
    paths = {path.relative_to(_PACKAGE).as_posix(): path for path in _PACKAGE.rglob("*.py")}
    texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    found = {name: [*_named(text)] if _VENDORS.search(text) else [] for name, text in texts.items()}
    return {name: words for name, words in found.items() if words or _VENDORS.search(name)}


@pytest.mark.parametrize(
    ("source", "is_named"),
    [
        ("torch.cuda.synchronize()", True),
        ("import pynvml", True),
        ("def cuda_clock(): ...", True),
        ("work(nccl=1)", True),
        ('x = f"{a} NCCL_DEBUG"', True),
        ('"""CUDA."""\nx = 1  # NVML\nclass A:\n    y: int\n    """NCCL\'s."""', False),
    ],
)
def test_words_of_code_count_and_those_of_explanations_do_not(source: str, is_named: bool) -> None:
    assert bool([*_named(source)]) == is_named


def test_two_files_name_a_vendors_software_and_the_others_say_why() -> None:
    found = _files()
    others = {name: words for name, words in found.items() if name not in DEVICES | {*EXCEPTIONS}}
    assert not others, "ask launch/device.py or observe/device.py"
    assert {*found} == DEVICES | {*EXCEPTIONS}, "an exception that is needed no more"
