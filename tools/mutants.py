"""Whether the tests see small faults: mutants drawn by a seed, each tried by the tests that run its line.

    nice -n 15 python -m tools.mutants --number 100 --seed 1 --lines /tmp/lines
    nice -n 15 python -m tools.mutants judge records --number 10 --seed 2

One place of the code is changed in a copy of the checkout: a comparison, a boolean operator, an arithmetic one, a
number, what is returned, a ``not`` or a call whose result nobody takes. Which tests run which lines is written down
first (``--lines`` keeps it for the next time). A mutant is tried by those that run its line, one of each function
first, until one fails. What they all miss is tried by all tests that need no torch: such mutants are put in together,
and each alone must fail one of the tests that failed then. A table says which test saw the mutant; the exit code is 1
where one survives.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest

from tools import lines, tables

REPOSITORY = Path(__file__).parents[1]
PACKAGE = Path("pytest_llmperf")

ROOMS = ("judge", "run", "records", "settings")
#: All that need no torch but those of the tree's own form, to which any change of a line is one.
TESTS = (
    *("tests/unit/cli", "tests/unit/insight", "tests/unit/judge", "tests/unit/launch", "tests/unit/plugin"),
    *("tests/unit/records", "tests/unit/report", "tests/unit/spec", "tests/unit/worker"),
    *("tests/engine", "tests/frozen", "tests/plugin"),
)

#: What no test can see, by its place and change, with the reason.
EQUIVALENT: Mapping[str, str] = {
    "records/steady_state.py: rho > 0 -> (rho >= 0)": "at 0 the formula below is 1, which it is already",
    "run/runner.py: 20.0 -> 21.0": "how long what is around a launch lasts is not known to a second",
    "run/tuning/winner.py: 1.0 -> 2.0": "what time ended has nothing left, which either is above",
}

_SURVIVED = "**survived**"
#: As tox.ini has them.
_USUAL = (
    "--hypothesis-profile=few",
    "-m",
    "not torchrun and not gpu and not wide and not simulated",
    "-p",
    "tools.lines",
)
_SECONDS = 3600.0
#: Tests that are given at first, before all others that run the line.
_FIRST = 60
#: Seconds of a test that is not among the chosen ones, as it might not end either.
_SLOW = 20.0
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
    start: int
    """Of what is replaced, in bytes of the file."""
    end: int
    before: str
    after: str
    lines: range
    in_function: bool

    @property
    def change(self) -> str:
        """As ``EQUIVALENT`` names it."""
        return f"{self.path.relative_to(PACKAGE)}: {_short(self.before)} -> {_short(self.after)}"

    def row(self, seen_by: str) -> tuple[str, ...]:
        change = self.change.partition(": ")[2].replace("|", "\\|")
        return (f"{self.path}:{self.lines.start}", f"`{change}`", seen_by)

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def _short(code: str) -> str:
    return " ".join(code.split())


def mutants(path: Path, source: str) -> Iterator[Mutant]:
    """All of a file; ``path`` as it stands in the checkout."""
    starts = [0]
    for line in source.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    tree = ast.parse(source)
    functions = [each for each in ast.walk(tree) if isinstance(each, (ast.FunctionDef, ast.Lambda))]
    for node in _code(tree):
        replacement = _mutated(node)
        if replacement is not None:
            first = starts[node.lineno - 1] + node.col_offset
            last = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            before = source.encode()[first:last].decode()
            inside = any(each.lineno <= node.lineno <= (each.end_lineno or 0) for each in functions)
            rows = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            yield Mutant(path, first, last, before, replacement, rows, inside)


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


def drawn(rooms: Sequence[str], number: int, seed: int) -> list[Mutant]:
    """Each place as likely as any other; a change of the code elsewhere leaves the others drawn."""
    found: dict[str, Mutant] = {}
    for room in rooms:
        for path in sorted((REPOSITORY / PACKAGE / room).rglob("*.py")):
            times = Counter[str]()
            for one in mutants(path.relative_to(REPOSITORY), path.read_text(encoding="utf-8")):
                times[one.change] += 1
                found[f"{seed} {one.change} {times[one.change]}"] = one
    names = sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest())
    return [found[name] for name in names[:number]]


@dataclass(frozen=True)
class Lines:
    """What ``tools.lines`` wrote of a run of all tests."""

    by_line: Mapping[str, Sequence[tuple[float, str]]]
    """Seconds and names of the tests that passed."""
    failed: frozenset[str]

    @classmethod
    def read(cls, folder: Path) -> Lines:
        by_line, failed = defaultdict[str, list[tuple[float, str]]](list), set[str]()
        for file in folder.glob("*/*"):
            name, *rows = file.read_text(encoding="utf-8").splitlines()
            end, _, seconds = rows[-1].partition(" ") if rows else ("", "", "")
            if end == "passed":
                for row in {*rows[:-1]}:
                    by_line[row].append((float(seconds), name))
            elif end != "skipped":
                failed.add(name)
        return cls(by_line, frozenset(failed))

    def of(self, mutant: Mutant) -> list[str]:
        """The tests that run it, one of each test function first, and the fastest of these.

        What runs as its module is imported does so in no test: it is tried by those that run another line of the file.
        """
        found = {each for line in mutant.lines for each in self.by_line.get(f"{mutant.path}:{line}", ())}
        if not mutant.in_function:
            found = {each for row, some in self.by_line.items() if row.startswith(f"{mutant.path}:") for each in some}
        times, order = Counter[str](), list[tuple[int, float, str]]()
        for seconds, name in sorted(each for each in found if each[0] < _SLOW):
            times[name.partition("[")[0]] += 1
            order.append((times[name.partition("[")[0]], seconds, name))
        return [name for *_, name in sorted(order)]


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
        begins = f"import os; os.environ.get({lines.FOLDER!r}) and __import__('tools.lines')"
        paths = [str(folder), *filter(None, sys.path), begins]
        (packages / "mutants.pth").write_text("\n".join(paths), encoding="utf-8")
        # Two changes within a second have the same time: what is compiled is held against the source itself.
        compiled = PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder / PACKAGE, quiet=1, force=True, invalidation_mode=compiled)
        return cls(folder, environment / "bin" / "python")

    @contextmanager
    def changed(self, some: Iterable[Mutant]) -> Iterator[None]:
        """Mutants of which none is part of another."""
        before = {one.path: (self.folder / one.path).read_bytes() for one in some}
        for one in sorted(some, key=lambda one: one.start, reverse=True):
            target = self.folder / one.path
            target.write_bytes(one.applied(target.read_bytes()))
        yield
        for path, source in before.items():
            (self.folder / path).write_bytes(source)

    def run(self, *words: str, **environment: str) -> tuple[int | None, str]:
        """Exit code and what was printed of a pytest; none where it took too long."""
        process = subprocess.Popen(
            [str(self.python), "-m", "pytest", "-q", "--tb=no", *_USUAL, *words],
            cwd=self.folder,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment,
            start_new_session=True,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            printed, _ = process.communicate(timeout=_SECONDS)
            return process.returncode, printed
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def lines(self, folder: Path) -> Lines:
        """Of all tests, a room of them after the other, but those that are written there."""
        for room in TESTS:
            target = folder.resolve() / room.replace("/", "-")
            part = target.with_suffix(".part")
            if not target.is_dir():
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
                self.run("--timeout=300", room, **{lines.FOLDER: str(part)})
                part.rename(target)
        return Lines.read(folder)

    def failed(self, tests: Sequence[str]) -> str:
        """The first of them that fails, in their order; empty: none does."""
        for some in filter(None, (tests[:_FIRST], tests[_FIRST:])):
            (self.folder.parent / "only").write_text("\n".join(some), encoding="utf-8")
            files = {name.partition("::")[0] for name in some}
            words = ("-x", "--timeout=60", "--randomly-dont-reorganize", *sorted(files))
            code, printed = self.run(*words, **{lines.ONLY: str(self.folder.parent / "only")})
            if code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
                found = re.search(r"(?m)^(?:FAILED|ERROR) (.+?)(?: - |$)", printed)
                return found[1] if found else f"exit code {code}"
        return ""


def apart(some: Iterable[Mutant]) -> Iterator[list[Mutant]]:
    """Groups in which no mutant is part of another."""
    left = list(some)
    while left:
        group = list[Mutant]()
        for one in left:
            if all(one.path != other.path or one.end <= other.start or other.end <= one.start for other in group):
                group.append(one)
        yield group
        left = [one for one in left if one not in group]


def tried(some: Sequence[Mutant], written: Path | None) -> Iterator[tuple[str, ...]]:
    """Rows, the first with the headings."""
    yield ("place", "change", "seen by")
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        copy = Copy.made(Path(scratch))
        known = copy.lines(written or Path(scratch, "lines"))
        missed, seeing = list[Mutant](), set[str]()
        for one in some:
            with copy.changed([one]):
                test = EQUIVALENT.get(one.change) or copy.failed(known.of(one))
            seeing.add(test)
            if test:
                yield one.row(test)
            else:
                missed.append(one)
        for number, group in enumerate(apart(missed)):
            with copy.changed(group):
                suspects = copy.lines(Path(scratch, f"lines{number}")).failed - known.failed
            for one in group:
                with copy.changed([one]):
                    test = copy.failed(sorted(suspects))
                seeing.add(test)
                yield one.row(test or _SURVIVED)
        if test := copy.failed(sorted(name for name in seeing if "::" in name)):
            sys.exit(f"{test} fails without any mutant")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", choices=[*ROOMS, []], help="default: all of these")
    parser.add_argument("--number", type=int, default=10, help="of mutants; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="another one draws others; default: %(default)s")
    parser.add_argument("--lines", type=Path, help="a folder outside the checkout: which tests run which lines")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what runs is ended too
    rows = list[tuple[str, ...]]()

    def kept() -> Iterator[tuple[str, ...]]:
        for row in tried(drawn(arguments.rooms or ROOMS, arguments.number, arguments.seed), arguments.lines):
            rows.append(row)
            yield row

    tables.table(kept())
    return int(any(row[-1] == _SURVIVED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
