"""Whether the tests see small faults: mutants drawn by a seed, each tried by the tests of its room.

    nice -n 15 python -m tools.mutants --number 100 --seed 1                  # an hour or two on an idle core
    nice -n 15 python -m tools.mutants judge records --number 10 --seed 2

One place of the code is changed in a copy of the checkout: a comparison, a boolean operator, an arithmetic one, a
number, what is returned, a ``not`` or a call whose result nobody takes. The room's own tests run first, then the
engine's and the frozen ones, then the plugin's, each until the first that fails. A table says which one saw the mutant;
the exit code is 1 where one survives.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import tables

REPOSITORY = Path(__file__).parents[1]
PACKAGE = Path("pytest_llmperf")

#: The tests that cover a room by themselves.
ROOMS: Mapping[str, Sequence[str]] = {
    "judge": ("tests/unit/judge", "tests/unit/insight"),
    "run": ("tests/unit/plugin", "tests/unit/report"),
    "records": ("tests/unit/records",),
    "settings": ("tests/unit/spec",),
}
LATER = (("tests/engine", "tests/frozen"), ("tests/plugin",))

#: What no test can see, by its place and change, with the reason.
EQUIVALENT: Mapping[str, str] = {}

_SURVIVED = "**survived**"
_MARKERS = "not torchrun and not gpu and not wide"
_SECONDS = 1800.0
_COMPARISONS: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_ARITHMETIC: Mapping[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: Path
    line: int
    start: int
    """Of what is replaced, in bytes of the file."""
    end: int
    before: str
    after: str

    @property
    def change(self) -> str:
        """As ``EQUIVALENT`` names it."""
        return f"{self.path.relative_to(PACKAGE)}: {_short(self.before)} -> {_short(self.after)}"

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def _short(code: str) -> str:
    return " ".join(code.split())


def mutants(path: Path, source: str) -> Iterator[Mutant]:
    """All of a file; ``path`` as it stands in the checkout."""
    starts = [0]
    for line in source.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    for node in _code(ast.parse(source)):
        replacement = _mutated(node)
        if replacement is not None:
            first = starts[node.lineno - 1] + node.col_offset
            last = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            before = source.encode()[first:last].decode()
            yield Mutant(path, node.lineno, first, last, before, replacement)


def _code(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The nodes that run: neither annotations, nor what types alone are imported for, nor the parts of f-strings."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, (ast.expr, ast.stmt)):
                yield child
            yield from _code(child)


def _mutated(node: ast.AST) -> str | None:
    """The code that takes its place; ``None``: it stays."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=comparators):
            changed: ast.AST = ast.Compare(left, [_COMPARISONS[type(op)]()], comparators)
        case ast.BoolOp(op=op, values=values):
            changed = ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC and not _is_text(left, right):
            changed = ast.BinOp(left, _ARITHMETIC[type(op)](), right)
        case ast.Constant(value=bool(value)):
            changed = ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            changed = ast.Constant(value + 1)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            changed = operand
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            changed = ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()):
            changed = ast.Pass()
        case _:
            return None
    code = ast.unparse(changed)
    return f"({code})" if isinstance(node, (ast.Compare, ast.BoolOp, ast.BinOp)) else code


def _is_text(*operands: ast.expr) -> bool:
    return any(
        isinstance(one, ast.JoinedStr) or (isinstance(one, ast.Constant) and isinstance(one.value, str))
        for one in operands
    )


def drawn(rooms: Sequence[str], number: int, seed: int) -> list[tuple[str, Mutant]]:
    """Rooms with mutants of theirs, each place as likely as any other."""
    found = []
    for room in rooms:
        for path in sorted((REPOSITORY / PACKAGE / room).rglob("*.py")):
            name, source = path.relative_to(REPOSITORY), path.read_text(encoding="utf-8")
            found += [(room, one) for one in mutants(name, source) if one.change not in EQUIVALENT]
    return random.Random(seed).sample(found, min(number, len(found)))  # noqa: S311 - nobody attacks


@dataclass(frozen=True)
class Copy:
    """A checkout of its own, with a Python that imports the package from there."""

    folder: Path
    python: Path

    @classmethod
    def made(cls, scratch: Path) -> Copy:
        folder, environment = scratch / "checkout", scratch / "venv"
        names = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
        for name in filter(None, names.stdout.split("\0")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
        venv.create(environment, symlinks=True)
        (packages,) = environment.glob("lib/python*/site-packages")
        (packages / "mutants.pth").write_text("\n".join([str(folder), *filter(None, sys.path)]), encoding="utf-8")
        return cls(folder, environment / "bin" / "python")

    def failed(self, paths: Sequence[str]) -> str:
        """The first test that fails there; empty: none does."""
        words = [str(self.python), "-B", "-m", "pytest", "-x", "-q", "--tb=no", "--timeout=300", "-m", _MARKERS, *paths]
        process = subprocess.Popen(
            words, cwd=self.folder, start_new_session=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        printed = ""
        try:
            printed, _ = process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode == 0:
            return ""
        found = re.search(r"(?m)^(?:FAILED|ERROR) (\S+)", printed)
        return found[1] if found else f"exit code {process.returncode} of {' '.join(paths)}"


def tried(rooms: Sequence[str], number: int, seed: int) -> Iterator[tuple[str, ...]]:
    """Rows, the first with the headings."""
    yield ("place", "change", "seen by")
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        copy = Copy.made(Path(scratch))
        for room in rooms:
            if test := copy.failed(ROOMS[room]):
                sys.exit(f"{test} fails without any mutant")
        for room, mutant in drawn(rooms, number, seed):
            target = copy.folder / mutant.path
            source = target.read_bytes()
            target.write_bytes(mutant.applied(source))
            test = next(filter(None, map(copy.failed, (ROOMS[room], *LATER))), _SURVIVED)
            target.write_bytes(source)
            change = mutant.change.partition(": ")[2].replace("|", "\\|")
            yield (f"{mutant.path}:{mutant.line}", f"`{change}`", test)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", choices=[*ROOMS, []], help="default: all of these")
    parser.add_argument("--number", type=int, default=10, help="of mutants; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="another one draws others; default: %(default)s")
    arguments = parser.parse_args()
    rows = list[tuple[str, ...]]()

    def kept() -> Iterator[tuple[str, ...]]:
        for row in tried(arguments.rooms or [*ROOMS], arguments.number, arguments.seed):
            rows.append(row)
            yield row

    tables.table(kept())
    return int(any(row[-1] == _SURVIVED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
