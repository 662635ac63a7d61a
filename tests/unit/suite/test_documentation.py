"""The documentation: what it shows was printed, what it names is there, and no page is long."""

from __future__ import annotations

import ast
import csv
import inspect
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from pytest_llmperf import Perf, ScriptSpec, TrainSpec
from pytest_llmperf.settings.space import ScriptSpace, read_axes
from tools import tables
from tools.documentation.blocks import (
    REPOSITORY,
    SHELLS,
    Block,
    blocks_of,
    data_tables_of,
    pages,
    steps,
    tables_of,
)
from tools.documentation.commands import troubles
from tools.documentation.printed import differences, folder_for_commands, printed_by

MOST_WORDS = 1500

PAGES = pages()
BLOCKS = [block for path in PAGES for block in blocks_of(path)]
NAMES = [str(path.relative_to(REPOSITORY)) for path in PAGES]

#: What nobody can run here, each with what it has to say of itself.
_ORIGINS = {
    "run": r"|torch",
    "tutorial": r"|fails|[\w./-]+\.py",
    "measured": r"\d{4}-\d\d-\d\d, \S.*",
    "file": r"\S+",
    "drawing": r"",
}
_LANGUAGES = ("bash", "console", "text", "python", "toml", "yaml")


def origin_trouble(block: Block) -> str:
    """What is missing of where a block comes from; empty: nothing."""
    if block.language not in _LANGUAGES:
        return f"its language is {block.language!r}, expected one of {', '.join(_LANGUAGES)}"
    if block.language == "yaml" and block.origin != "file":
        return "nobody runs it here: show lines of a file that is tested, <!-- from: file PATH -->"
    if block.shows_output and not block.origin:
        return "shows what was printed, and nothing says by what: <!-- from: … -->, see CONTRIBUTING.md"
    if block.origin and not re.fullmatch(_ORIGINS.get(block.origin, "(?!)"), block.detail):
        return f"<!-- from: {block.origin} {block.detail} --> is no origin, see CONTRIBUTING.md"
    if block.origin == "measured":
        date.fromisoformat(block.detail[:10])
    return ""


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
class TestOfEachBlock:
    def test_it_says_where_it_comes_from(self, block: Block) -> None:
        assert not origin_trouble(block)

    def test_its_commands_can_be_given(self, block: Block, pytestconfig: pytest.Config) -> None:
        found = [
            each
            for command, _ in (steps(block) if block.language in SHELLS else [])
            for each in troubles(command, pytestconfig._parser)
        ]
        assert not found

    def test_its_python_calls_what_is_there(self, block: Block) -> None:
        if block.language == "python":
            assert not unknown_keywords(ast.parse(block.text))

    def test_its_space_is_one(self, block: Block, tmp_path: Path) -> None:
        if block.language == "toml":
            (tmp_path / "space.toml").write_text(block.text, encoding="utf-8")
            words = re.findall(r"^(\w+) = \[", block.text, re.MULTILINE) if "[axes]" not in block.text else []
            command = {"command": " ".join(["train.py", *(f"{{{word}}}" for word in words)])}
            path = tmp_path / "space.toml"
            assert ScriptSpace.read(command, path, tmp_path) if words else read_axes(path)


def unknown_keywords(tree: ast.Module) -> list[str]:
    """Keywords that neither a method of ``perf`` nor a spec takes."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="perf"), attr=str(name))):
                known = inspect.signature(getattr(Perf, name)).parameters
                if name == "script":  # it takes a spec's fields
                    known = inspect.signature(ScriptSpec.__init__).parameters
            case ast.Call(func=ast.Name(id="ScriptSpec" as name)):
                known = inspect.signature(ScriptSpec.__init__).parameters
            case ast.Call(func=ast.Name(id="TrainSpec" | "replace" as name)):
                known = inspect.signature(TrainSpec.__init__).parameters
            case _:
                continue
        found += [f"{name}({each.arg}=…)" for each in node.keywords if each.arg not in known]
    return found


RUN = sorted({block.page for block in BLOCKS if (block.origin, block.detail) == ("run", "")})


@pytest.mark.parametrize("page", RUN, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_what_is_run_prints_what_is_shown(page: Path, tmp_path: Path) -> None:
    folder = folder_for_commands(tmp_path)
    for block in blocks_of(page):
        for command, shown in steps(block) if (block.origin, block.detail) == ("run", "") else ():
            printed = printed_by(command, folder)
            again = f"{block.place}: python -m tools.documentation writes it again"
            assert not differences(shown, printed), again


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.origin == "file"], ids=lambda block: block.place)
def test_what_is_of_a_file_stands_there(block: Block) -> None:
    assert block.text in (REPOSITORY / block.detail).read_text(encoding="utf-8")


_EXPLAINED = [page for page in PAGES if "explanation" in page.parts]
TABLES = [table for page in _EXPLAINED for table in (*tables_of(page), *data_tables_of(page))]
_OF_TABLES = {
    "run": r"python -m .+",
    "computed": r"(?:python -m|llmperf) .+",
    "data": r"docs/data/tables/\S+\.csv",
    "rule": r"",
    "measured": "",
}


def table_trouble(table: Block) -> str:
    """What is missing of where a table of measurements comes from; empty: nothing."""
    pattern = _OF_TABLES.get(table.origin, "(?!)") or _ORIGINS.get(table.origin, "")
    if not re.fullmatch(pattern, table.detail):
        return f"nothing says where its figures come from: {table.origin} {table.detail}; see CONTRIBUTING.md"
    if table.origin == "measured":
        date.fromisoformat(table.detail[:10])
    return ""


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.place)
def test_a_table_of_measurements_says_where_it_comes_from(table: Block, pytestconfig: pytest.Config) -> None:
    assert not table_trouble(table)
    if table.origin in ("run", "computed"):
        assert not list(troubles(table.detail, pytestconfig._parser))


# Hundreds of launches are replayed in three seconds.
RUN_TABLES = [
    pytest.param(each, marks=[pytest.mark.wide] if "script_power" in each.detail else [], id=each.place)
    for each in TABLES
    if each.origin == "run"
]


@pytest.mark.processes
@pytest.mark.parametrize("table", RUN_TABLES)
def test_a_table_that_is_run_is_what_is_printed(table: Block) -> None:
    words = [sys.executable, *table.detail.split()[1:]]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    printed = [line for line in done.stdout.splitlines() if line.startswith("|")]
    if table.language == "csv":
        assert rows_of(table.text) == [tables.cells(line) for line in (printed[0], *printed[2:])]
    else:
        assert table.text.splitlines() == printed


def rows_of(text: str) -> list[tuple[str, ...]]:
    """Of a data file; the first is its header."""
    return [tuple(row) for row in csv.reader(text.splitlines())]


@pytest.mark.parametrize("table", [each for each in TABLES if each.origin == "data"], ids=lambda table: table.place)
def test_rows_of_a_data_file_stand_there(table: Block) -> None:
    header, _, *lines = map(tables.cells, table.text.splitlines())
    names, *rows = rows_of((REPOSITORY / table.detail).read_text(encoding="utf-8"))
    places = [names.index(name) for name in header]
    there = {tuple(row[place] for place in places) for row in rows}
    assert [line for line in lines if line not in there] == []


def test_each_made_table_is_shown_by_one_page() -> None:
    shown = [table.text for table in TABLES if table.language == "csv"]
    made = [path.read_text(encoding="utf-8") for path in tables.FOLDER.glob("*.csv")]
    assert len(made) >= 5
    assert sorted(shown) == sorted(made)
    assert all(len({len(row) for row in rows_of(text)}) == 1 for text in made)
    for page in _EXPLAINED:
        text = page.read_text(encoding="utf-8")
        for file in re.findall(r"(?m)^:file: (\S+)$", text):
            assert f"]({file})" in text, "GitHub shows no such table, but the link to it"


def test_a_table_that_is_written_is_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    rows = [("world", "launches (median, mean)"), ("a, b", "1, 1.00")]
    tables.table(rows, "some")
    assert rows_of((tmp_path / "some.csv").read_text(encoding="utf-8")) == rows
    assert [tables.cells(line) for line in capsys.readouterr().out.splitlines()][::2] == rows


INLINE = [
    (page, code)
    for page in PAGES
    for code in re.findall(
        r"`((?:pytest|llmperf|make|python -m|python tools/)[ ][^`]+)`", page.read_text(encoding="utf-8")
    )
]


@pytest.mark.parametrize(("page", "code"), INLINE, ids=lambda value: value if isinstance(value, str) else value.stem)
def test_a_command_in_a_sentence_can_be_given(page: Path, code: str, pytestconfig: pytest.Config) -> None:
    assert not list(troubles(" ".join(code.split()), pytestconfig._parser, is_named=True))


def words_of(text: str) -> int:
    """As they are read: those of tables too, and not those of printed blocks."""
    shown = re.sub(r"(?ms)^( *)(`{3,}).*?^\1\2 *$|<!--.*?-->", "", text)
    return sum(1 for word in re.sub(r"\]\([^)]*\)", "]", shown).split() if re.search(r"\w", word))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_no_page_is_long(page: Path) -> None:
    assert words_of(page.read_text(encoding="utf-8")) <= MOST_WORDS


def _named() -> list[tuple[str, str]]:
    """Each path below docs/ that a file of the repository names, by that file."""
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    found = []
    for name in listed.splitlines():
        path = REPOSITORY / name
        # A change told of the pages that there were; a stored figure of the sources.
        if name == "CHANGELOG.md" or name.startswith("baselines/") or not path.is_file():
            continue
        if path.suffix in (".py", ".md", ".toml", ".ini", ".sbatch", ".yml") or name == "Makefile":
            text = path.read_text(encoding="utf-8")
            found += [(name, each) for each in re.findall(r"(?<![\w./-])docs/[\w./*-]*[\w*]", text)]
    return sorted(set(found))


@pytest.mark.parametrize(("name", "path"), _named(), ids=str)
def test_a_page_that_is_named_is_there(name: str, path: str) -> None:
    if not (REPOSITORY / path).exists():
        assert list(REPOSITORY.glob(f"{path}*")), f"{name} names {path}"


def _links() -> list[tuple[Path, str]]:
    return [
        (page, target)
        for page in [*PAGES, REPOSITORY / "CHANGELOG.md"]
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        if not re.match(r"[a-z]+:", target)
    ]


def _anchors(page: Path) -> set[str]:
    without = re.sub(r"(?ms)^`{3,}.*?^`{3,} *$", "", page.read_text(encoding="utf-8"))
    headings = re.findall(r"(?m)^#+ (.*)$", without)
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in headings}


def test_every_link_leads_somewhere_on_github_too() -> None:
    lost = []
    for page, target in _links():
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
            lost.append(f"{page.relative_to(REPOSITORY)}: {target}")
    assert not lost


class TestOfTheRule:
    """Each test above can fail."""

    def block(self, language: str, text: str, origin: str = "", detail: str = "") -> Block:
        return Block(REPOSITORY / "docs" / "index.md", 1, language, text, origin, detail)

    @pytest.mark.parametrize(
        ("language", "origin", "detail", "said"),
        [
            ("text", "", "", "nothing says by what"),
            ("console", "", "", "nothing says by what"),
            ("", "drawing", "", "its language"),
            ("text", "measured", "some day, a machine", "no origin"),
            ("text", "memory", "", "no origin"),
            ("text", "measured", "2026-11-21, one H200", ""),
            ("yaml", "", "", "nobody runs it here"),
            ("yaml", "file", "docs/ci/gitlab-ci.yml", ""),
            ("bash", "", "", ""),
        ],
    )
    def test_what_was_printed_has_an_origin(self, language: str, origin: str, detail: str, said: str) -> None:
        text = "$ llmperf baselines list\nprinted\n" if language == "console" else "printed\n"
        found = origin_trouble(self.block(language, text, origin, detail))
        assert bool(said) == bool(found)
        assert said in found

    @pytest.mark.parametrize(
        ("origin", "detail", "is_said"),
        [
            ("", "", False),
            ("drawing", "", False),
            ("run", "", False),
            ("measured", "some day", False),
            ("measured", "2026-11-21, one H200", True),
            ("computed", "python -m tools.verdicts simulate --gates 4000", True),
            ("page", "noise.md", False),
            ("data", "docs/data/tables/nights.csv", True),
            ("rule", "", True),
        ],
    )
    def test_a_table_has_an_origin(self, origin: str, detail: str, is_said: bool) -> None:
        assert bool(table_trouble(self.block("table", "| |\n|-|\n", origin, detail))) != is_said

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("pytest perf_tests --gpus 1 --perf-statics", "pytest has no --perf-statics"),
            ("pytest perf_test/test_ladder.py --gpus 1", ""),
            ("pytest perf_tests/test_ladders.py --gpus 1", "there is no perf_tests/test_ladders.py"),
            ("LLMPERF_INJECT=slow=5 pytest --gpus 0 && llmperf baselines lst", "invalid choice: 'lst'"),
            ("llmperf check model=llama-tiny modle=x --gpus 0", "TrainSpec has no modle"),
            ("llmperf report --table > out.md", ""),
            ("llmperf report --tables --tabels > out.md", "unrecognized arguments: --tabels"),
            ("python -m tools.verdict simulate", "there is no tools/verdict.py"),
            ("python tools/verdicts.py simulate --gate 4000", "has no --gate"),
            ("make tests", "make has no tests"),
            ("pip install 'pytest-llmperf[pages]'", "there is no extra pages"),
            ("curl example.org", "nobody here knows"),
        ],
    )
    def test_a_command_that_cannot_be_given_is_told(self, line: str, said: str, pytestconfig: pytest.Config) -> None:
        found = list(troubles(line, pytestconfig._parser))
        assert bool(found) == bool(said)
        assert said in "".join(found)

    @pytest.mark.parametrize(
        ("shown", "printed", "difference"),
        [
            ("a\nb", "a\nb", ""),
            ("a\n…", "a\nb\nc", ""),
            ("…\nc", "a\nb\nc", ""),
            ("a\n…\nc", "a\nc", ""),
            ("a\n…\nd", "a\nb\nc", "d"),
            ("a", "a\nb", "b"),
            ("b", "a\nb", "b"),
            ("…\nc\n…\na", "a\nc", "a"),
            ("a b, …\nc", "a b, and more\nc", ""),
            ("a b, …\nc", "a c, and more\nc", "a b, …\nc"),
        ],
    )
    def test_an_ellipsis_stands_for_what_is_left_out(self, shown: str, printed: str, difference: str) -> None:
        assert differences(shown, printed) == difference

    def test_an_unknown_keyword_is_told(self) -> None:
        source = "perf.compare(a, b, throughput_at_lest=1)\nTrainSpec(modle='x')\nTrainSpec(model='x')"
        assert unknown_keywords(ast.parse(source)) == ["compare(throughput_at_lest=…)", "TrainSpec(modle=…)"]

    def test_words_of_tables_count_and_those_of_blocks_do_not(self) -> None:
        assert words_of("# One\n\n| two | three |\n|---|---|\n\n```text\nnot these\n```\n[four](five.md)\n") == 4


#: What stands in a reader's own project.
_OF_READERS = (
    ".github/workflows/llmperf.yml",
    "perf_tests/test_mine.py",
    "perf_tests/test_tuned.py",
    "site/sitecustomize.py",
    "test_mine.py",
    "test_train.py",
    "train.py",
)
_FOLDERS = [REPOSITORY, *(REPOSITORY / name for name in ("pytest_llmperf", "docs"))]


def _sources() -> list[tuple[Path, str]]:
    """Files by their paths, drawn ones too, and modules by their names alone."""
    found = re.compile(r"(?<![\w./-])(\.?(?:[\w-]+/)+[\w-]+\.(?:py|sbatch|ini|toml|yml))\b|`([a-z_]+\.py)`")
    return [
        (page, path)
        for page in PAGES
        for path in sorted({one or other for one, other in found.findall(page.read_text(encoding="utf-8"))})
    ]


@pytest.mark.parametrize(
    ("page", "path"), _sources(), ids=lambda value: value if isinstance(value, str) else value.stem
)
def test_a_source_that_is_named_is_there(page: Path, path: str) -> None:
    if path not in _OF_READERS:
        beside = [] if "/" in path else [each for folder in _FOLDERS for each in folder.rglob(path)]
        assert beside or any((folder / path).exists() for folder in _FOLDERS)


def test_every_nightly_example_is_strict() -> None:
    """A loss that is not decided passes else, and nobody looks at a green night."""
    ci = [line for path in (REPOSITORY / "docs" / "ci").glob("*.yml") for line in path.read_text("utf-8").splitlines()]
    gates = [line for line in ci if re.search(r"pytest .*--gpus [1-9]", line) and "--update-baselines" not in line]
    examples = (REPOSITORY / "slurm" / "clusters").glob("*.ini")
    gates += [line for path in examples for line in path.read_text("utf-8").splitlines() if "perf_tests" in line]
    assert len(gates) >= 5
    assert [line for line in gates if "--perf-strict" not in line and not line.startswith(";")] == []
