"""Each front-end gives the same answer to what it shares with others: options, mistakes and what ends a run early."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pytest_llmperf.cli import answer, main
from pytest_llmperf.cli.answer import add_shared
from pytest_llmperf.cli.asked_run import Terminal
from pytest_llmperf.run.findings import UsageError
from pytest_llmperf.run.options import BISECT, CHECK, PYTEST, STORED, TUNE, WORDS, Option, Settings, table
from pytest_llmperf.run.reading import read_settings
from tests.fakes import install, write_fake
from tests.golden import Golden
from tests.plugin.conftest import REPOSITORY, Project

OPTIONS = dict(table(Settings))
SHARED = [(name, front) for name, one in OPTIONS.items() for front in (CHECK, TUNE, BISECT) if front in one.fronts]

#: A value of each, as typed, and what the run has of it.
TYPED: dict[str, tuple[str, Any]] = {
    "gpus": ("0", 0),
    "update": ("new", "new"),
    "reason": ("why", "why"),
    "baselines": ("figures", "figures"),
    "json": ("out.json", "out.json"),
    "soak_minutes": ("5", 5.0),
    "start": ("cold", "cold"),
    "overlap": ("no", False),
    "trace": ("no", False),
    "calibration": ("no", False),
    "all_steps": ("3", 3),
    "history": ("past.sqlite", "past.sqlite"),
    "timeout_seconds": ("99", 99.0),
    "launches": ("2", 2),
    "max_launches": ("9", 9),
    "memory_limit_bytes": ("2GiB", 2 * 2**30),
    "machine": ("mine", "mine"),
}


def parsed(front: str, words: list[str]) -> Namespace:
    """What ``front`` has of ``words``."""
    if front == PYTEST:
        from _pytest.config.argparsing import Parser  # noqa: PLC0415 - private, and pytest's alone

        from pytest_llmperf.plugin.hooks import add_options  # noqa: PLC0415 - the same

        parser = Parser(_ispytest=True)
        add_options(parser)
        return parser.parse(words)
    command = ArgumentParser()
    add_shared(command, front)
    return command.parse_args(words)


def settings(front: str, words: list[str], here: Path) -> Settings:
    return read_settings(front, parsed(front, words), here=here, rootdir=here)


def words_of(name: str, option: Option, front: str) -> list[str]:
    more = ["--update-baselines=new"] if name == "reason" else []
    flag = option.at(front, "flag")
    return [*more, flag] if option.is_switch else [*more, f"{flag}={TYPED[name][0]}"]


@pytest.mark.parametrize(("name", "front"), SHARED)
def test_a_shared_option_sets_the_same_in_each_front_end(name: str, front: str, tmp_path: Path) -> None:
    option = OPTIONS[name]
    (tmp_path / "figures").mkdir()  # a run that compares has baselines
    found = [getattr(settings(front, words_of(name, option, front), tmp_path), name)]
    if PYTEST in option.fronts:
        found.append(getattr(settings(PYTEST, words_of(name, option, PYTEST), tmp_path), name))
    expected: Any = True if option.is_switch else TYPED[name][1]
    assert found == [tmp_path / expected if option.path else expected] * len(found)


@pytest.mark.parametrize(("name", "front"), SHARED)
def test_nobody_saying_anything_is_the_default_of_the_table(name: str, front: str, tmp_path: Path) -> None:
    option, found = OPTIONS[name], settings(front, [], tmp_path)
    if name == "baselines":
        assert found.baselines == tmp_path / "baselines"
    elif name == "history":
        assert found.history == settings(PYTEST, [], tmp_path).history
    else:
        assert getattr(found, name) == option.at(front, "default")


MISTAKES = [
    (["--perf-json=missing/out.json"], (PYTEST, CHECK), "--perf-json .*not a file in a folder that exists"),
    (["--perf-json=sealed/out.json"], (PYTEST, CHECK), "--perf-json .*cannot be written"),
    (["--perf-json=folder"], (PYTEST, CHECK), "--perf-json .*folder: a folder, expected a file; name one in it"),
    (["--perf-json=test_mine.py"], (PYTEST, CHECK), "--perf-json .*written .it ends in"),
    (["--perf-history=missing/h"], (PYTEST, CHECK), "--perf-history .*; or off, which keeps no history"),
    (["--perf-reason=why"], (PYTEST, CHECK), "--perf-reason says why a baseline changes; it goes with"),
    (["--perf-baselines=sealed", "--update-baselines=new"], (PYTEST, CHECK), "baselines .*sealed: cannot be written"),
    (["--perf-baselines=sealed/a/b", "--update-baselines"], (PYTEST, CHECK), "baselines .*/b: cannot be written"),
    (["--perf-launches=3", "--perf-max-launches=2"], (PYTEST, CHECK), "--perf-launches 3 is more than"),
    ([], (PYTEST, CHECK, TUNE, BISECT), "LLMPERF_INJECT='slwo=5': .*did you mean 'slow'"),
]


def test_a_folder_of_baselines_may_be_others_where_that_of_a_machine_in_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sealed" / "mine").mkdir(parents=True)
    (tmp_path / "sealed" / "README.md").touch()
    own, words = [tmp_path / "sealed" / "mine"], ["--perf-baselines=sealed", "--update-baselines"]
    monkeypatch.setattr("pytest_llmperf.run.reading.refused_at", lambda _: "read-only")
    monkeypatch.setattr("pytest_llmperf.run.reading.os.access", lambda path, _: path in own)
    assert settings(CHECK, words, tmp_path).update == "all"
    own.clear()
    with pytest.raises(UsageError, match="read-only"):
        settings(CHECK, words, tmp_path)


@pytest.mark.parametrize(
    ("words", "front", "said"), [(words, front, said) for words, fronts, said in MISTAKES for front in fronts]
)
def test_a_mistake_is_the_same_usage_error_before_anything_is_launched(
    words: list[str], front: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "target").touch()
    (tmp_path / "sealed").mkdir()
    monkeypatch.setattr(
        "pytest_llmperf.run.reading.refused_at", lambda path: "read-only" if path.parent.name == "sealed" else ""
    )
    if not words:
        monkeypatch.setenv("LLMPERF_INJECT", "slwo=5")
    with pytest.raises(UsageError, match=said) as refused:
        settings(front, words, tmp_path)
    assert "\n" not in str(refused.value)


UNKNOWN = [
    ("--perf-jsn=x", "--perf-jsn=x (did you mean '--perf-json'?)"),
    ("--perf-price=2", "--perf-price=2 (removed; --perf-json has tokens/s per GPU, which a price divides)"),
]


@pytest.mark.parametrize(("word", "said"), UNKNOWN)
def test_an_option_that_is_unknown_or_gone_is_told_what_serves(
    word: str, said: str, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    result = project.run(word)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"unrecognized arguments: {said}" in result.stderr.str()
    with pytest.raises(SystemExit, match="2"):
        main(["check", "model=llama-tiny", word])
    assert f"unrecognized arguments: {said}" in capsys.readouterr().err


def test_an_option_of_a_plugin_that_is_not_there_is_pytests_to_refuse(project: Project) -> None:
    result = project.run("--cov-report=html")
    assert "(did you mean" not in result.stderr.str()


@pytest.mark.parametrize("front", [CHECK, TUNE, BISECT, STORED, "history"])
def test_a_file_in_the_place_of_baselines_is_a_usage_error_of_each_command(
    front: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        parsed(front, [f"--perf-baselines={tmp_path / 'file'}"])
    assert ended.value.code == 2
    golden.lines(capsys.readouterr().err, "file: it is")


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which commands launch fakes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLMPERF_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(Terminal, "say", lambda *_: None)
    install()
    yield tmp_path
    mock.patch.stopall()


ENDS = [("interrupt", "interrupted", 130), ("SIGTERM", "SIGTERM", 143)]


@pytest.mark.parametrize(("fail", "said", "_code"), ENDS)
def test_what_ends_pytest_early_costs_no_result_that_was_there(
    project: Project, fail: str, said: str, _code: int
) -> None:
    project.fake(sequence=[{}, {"fail": fail}])
    assert project.run("--perf-json", "out.json").ret == pytest.ExitCode.INTERRUPTED
    document = json.loads((project.path / "out.json").read_text())
    assert [result["verdict"] for result in document["results"]] == ["new"]
    assert (document["unfinished"], document["exit_code"]) == (said, 2)


# The second Ctrl-C: while pytest shows the first, and while the run writes what it has found.
PRESSED_AGAIN = {
    "shown": "def pytest_keyboard_interrupt():\n    raise KeyboardInterrupt\n",
    "written": """import signal
from pytest_llmperf.run import run_end
signal.signal(signal.SIGINT, signal.default_int_handler)
plain = run_end.judged_together
def again(*args):
    signal.raise_signal(signal.SIGINT)
    return plain(*args)
run_end.judged_together = again
""",
}


@pytest.mark.parametrize("when", PRESSED_AGAIN)
def test_a_second_ctrl_c_makes_no_green_run_and_costs_no_result(project: Project, when: str) -> None:
    project.fake(sequence=[{}, {"fail": "interrupt"}])
    (project.path / "again.py").write_text(PRESSED_AGAIN[when])
    assert project.run("-p", "again", "--perf-json", "out.json").ret != 0
    document = json.loads((project.path / "out.json").read_text())
    assert [result["verdict"] for result in document["results"]] == ["new"]
    assert (document["unfinished"], document["exit_code"]) == ("interrupted", 2)


@pytest.mark.parametrize(("fail", "said", "code"), ENDS)
def test_nor_of_a_command_that_checks(commands: Path, fail: str, said: str, code: int) -> None:
    spec = ["model=llama-tiny", "sequence_length=64", "steps=20"]
    assert main(["check", *spec, "--gpus", "0", "--update-baselines"]) == 0
    (stored,) = Path("baselines").rglob("*.json")
    (commands / "launches.txt").unlink()
    write_fake(commands, sequence=[{}, {"fail": fail}])
    words = [stored.stem, "model=llama-tiny", "sequence_length=32", "--gpus", "0", "--perf-json", "out.json"]
    assert main(["check", *words]) == code
    document = json.loads(Path("out.json").read_text())
    assert [result["verdict"] for result in document["results"]] == ["pass"]
    assert (document["unfinished"], document["exit_code"]) == (said, code)


@pytest.mark.parametrize(
    "words",
    [
        ["check", "model=llama-tiny"],
        ["tune", "llama-tiny"],
        ["bisect", "model=llama-tiny", "--python", "x{version}", "--versions", "1,2", "--good", "1", "--bad", "2"],
    ],
)
def test_a_fault_that_is_misspelt_is_one_line_of_a_command_and_exit_code_2(
    commands: Path,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    golden: Golden,
) -> None:
    monkeypatch.setenv("LLMPERF_INJECT", "slwo=5")
    with pytest.raises(SystemExit) as ended:
        main([*words, "--gpus", "0"])
    assert ended.value.code == 2
    *usage, said = capsys.readouterr().err.splitlines()
    golden.lines(said, "did you mean")
    assert usage[0].startswith("usage: ")
    assert not (commands / "launches.txt").exists()


def test_ctrl_c_while_a_line_is_printed_costs_no_result_either(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(answer, "leaving", interrupted)
    assert main(["check", "model=llama-tiny", "--gpus", "0", "--perf-json", "out.json"]) == 130
    document = json.loads((commands / "out.json").read_text())
    assert ([result["verdict"] for result in document["results"]], document["unfinished"]) == (["new"], "interrupted")


def test_every_flag_of_the_table_has_words_and_no_words_are_of_another() -> None:
    shown = {one.flag for one in OPTIONS.values() if one.flag} - {"--update-baselines"}  # whose ways have words each
    spoken = {flag for place in (PYTEST, "llmperf") for flag in WORDS[place]}
    assert spoken == shown
    assert spoken.issuperset(flag for place in (TUNE, "history", "report") for flag in WORDS[place])
    assert {one.ini for one in OPTIONS.values()}.issuperset(WORDS["ini"])


def test_no_words_of_a_command_are_of_an_option_that_it_does_not_have() -> None:
    spoken: dict[str, set[str]] = {}

    def note(parser: ArgumentParser) -> None:
        assert isinstance(parser, answer.CommandParser)
        parser.read_options()
        names = spoken[parser.prog.removeprefix("llmperf ")] = set()
        for action in parser._actions:
            names |= {*action.option_strings, action.dest}
            for name, command in (action.choices if isinstance(action, _SubParsersAction) else {}).items():
                names.add(name)
                note(command)

    note(answer.arguments_parser())
    everything = {name for names in spoken.values() for name in names}
    for section in answer.WORDS.sections():
        assert set(answer.WORDS[section]) <= spoken.get(section, everything), section


def test_no_flag_of_the_table_is_declared_a_second_time() -> None:
    flags = [option.flag for option in OPTIONS.values() if option.flag]
    assert len(flags) == len(set(flags)) > 25
    # A command that predicts has a list of numbers as its --gpus.
    sources = [path for path in (REPOSITORY / "pytest_llmperf").rglob("*.py") if "predict" not in path.parts]
    declared = re.compile(r'\badd\w*\(\s*"(--[a-z-]+)"')
    found = {flag for path in sources for flag in declared.findall(path.read_text()) if flag in flags}
    assert found == set()
