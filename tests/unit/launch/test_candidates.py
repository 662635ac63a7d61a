"""Candidates: which lie between two ends, the interpreter of each, and what is refused in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_llmperf.launch import histories
from pytest_llmperf.launch.histories import (
    CommandHistory,
    GitHistory,
    HistoryError,
    NoRoomError,
    NotMadeError,
    probed,
)
from tests.golden import Golden
from tests.waiting import until

# Each asks git, pip or an interpreter.
pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMPERF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setattr(histories, "probed", lambda python: python)


class Project:
    """A git project, a commit for each word."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "-q", "-b", "main")

    def git(self, *words: str) -> str:
        who = ["-c", "user.name=Ann", "-c", "user.email=ann@example.org"]
        return subprocess.run(
            ["git", *who, *words], cwd=self.folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    def commit(self, text: str) -> str:
        (self.folder / "mine.py").write_text(f"WORD = {text!r}\n")
        self.git("add", "-A")
        self.git("commit", "-qm", text)
        return self.git("rev-parse", "HEAD")

    def state(self) -> list[str]:
        """All of the user's own that a bisection must not touch."""
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file() and path.name != "index")
        return [f"{path} {path.stat().st_mtime_ns}" for path in paths]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def word_of(python: str) -> str:
    said = subprocess.run([python, "-c", "import mine; print(mine.WORD)"], capture_output=True, text=True, check=True)
    return said.stdout.strip()


class TestGit:
    def test_its_commits_come_in_order_with_subject_and_author(self, project: Project) -> None:
        hashes = [project.commit(text) for text in ("one", "two", "three")]
        span = GitHistory(project.folder).span(hashes[0][:8], "main")
        assert (span.good.name, span.good.parents) == (hashes[0], ())
        assert [(one.name, one.parents, one.subject, one.author) for one in span.candidates] == [
            (hashes[1], (hashes[0],), "two", "Ann"),
            (hashes[2], (hashes[1],), "three", "Ann"),
        ]
        assert span.candidates[0].told.startswith(f"{hashes[1][:12]} two (Ann, 2")

    def test_each_has_an_interpreter_of_its_own_and_the_checkout_is_left_alone(
        self, project: Project, monkeypatch: pytest.MonkeyPatch, golden: Golden
    ) -> None:
        for text in ("one", "two"):
            project.commit(text)
        (project.folder / "mine.py").write_text("WORD = 'not committed'\n")
        before = project.state()
        history = GitHistory(project.folder)
        span = history.span("HEAD~1", "HEAD")
        golden(span.notes)
        monkeypatch.chdir(project.folder.parent)
        monkeypatch.setenv("PYTHONPATH", str(project.folder.parent / "of_the_launch"))
        pythons = [history.python(one) for one in (span.good, *span.candidates)]
        assert [word_of(python) for python in pythons] == ["one", "two"]
        assert project.state() == before
        assert project.git("worktree", "list").count("\n") == 0

    def test_what_a_launch_put_first_stays_first_and_the_users_own_path_comes_after(
        self, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        project.commit("one")
        project.commit("two")
        (tmp_path / "first").mkdir()
        (tmp_path / "last").mkdir()
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/first:{tmp_path}/last")
        python = GitHistory(project.folder).python(GitHistory(project.folder).span("HEAD~1", "HEAD").good)
        said = subprocess.run([python, "-c", "import sys; print(sys.path)"], capture_output=True, text=True, check=True)
        path = said.stdout
        assert path.index("/first'") < path.index("/tree'") < path.index("/last'")

    def test_a_script_has_the_tree_of_a_revision_and_of_its_own_folder(self, project: Project) -> None:
        project.commit("before")
        (project.folder / "sub").mkdir()
        (project.folder / "sub" / "train.py").write_text("")
        project.commit("after")
        assert (GitHistory(project.folder).tree("HEAD~1") / "mine.py").read_text() == "WORD = 'before'\n"
        assert (GitHistory(project.folder / "sub").tree("HEAD") / "train.py").exists()
        with pytest.raises(NotMadeError, match="there was no"):
            GitHistory(project.folder / "sub").tree("HEAD~1")
        with pytest.raises(HistoryError, match="no such revision"):
            GitHistory(project.folder).tree("gone")

    def test_what_was_made_is_made_once_and_a_build_runs_in_it(self, project: Project) -> None:
        project.commit("one")
        project.commit("two")
        history = GitHistory(project.folder, build="date +%s%N > built; echo 'BUILT = 1' >> mine.py")
        good = history.span("HEAD~1", "HEAD").good
        python = history.python(good)
        tree = Path(python).parent / "tree"
        when = (tree / "built").read_text()
        assert history.python(good) == python
        assert (tree / "built").read_text() == when

    @pytest.mark.skipif(sys.version_info < (3, 11), reason="there it is refused")
    def test_started_in_the_project_a_module_sees_its_revision_and_not_the_checkout(
        self, project: Project, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for text in ("one", "two"):
            (project.folder / "asks.py").write_text("import mine; print(mine.WORD)")
            project.commit(text)
        monkeypatch.chdir(project.folder)
        history = GitHistory(Path())
        python = history.python(history.span("HEAD~1", "HEAD").good)
        # As torchrun and its ranks are started.
        said = subprocess.run([python, "-m", "asks"], capture_output=True, text=True, check=True)
        assert said.stdout.strip() == "one"

    def test_a_python_that_would_import_the_checkout_is_refused_in_it(
        self, project: Project, monkeypatch: pytest.MonkeyPatch, golden: Golden
    ) -> None:
        project.commit("one")
        project.commit("two")
        monkeypatch.setattr(histories, "_HAS_SAFE_PATH", False)
        history = GitHistory(project.folder)
        assert history.span("HEAD~1", "HEAD").candidates
        (project.folder / "below").mkdir()
        monkeypatch.chdir(project.folder / "below")
        with pytest.raises(HistoryError) as raised:
            history.span("HEAD~1", "HEAD")
        golden(raised)

    @pytest.mark.parametrize("odd", ["\x0c", "\x85", "\u2028"])
    def test_a_subject_or_an_author_with_any_sign_is_one_line(self, project: Project, odd: str) -> None:
        project.commit("one")
        hashes = [project.commit(f"two{odd}halves"), project.commit("three")]
        project.git("commit", "-q", "--allow-empty", "-m", "four", "--author", f"A{odd}nn <ann@example.org>")
        span = GitHistory(project.folder).span("HEAD~3", "HEAD")
        assert [one.name for one in span.candidates] == [*hashes, project.git("rev-parse", "HEAD")]
        assert span.candidates[0].subject == f"two{odd}halves"

    def test_a_build_that_fails_is_one_line_and_leaves_nothing(self, project: Project, tmp_path: Path) -> None:
        project.commit("one")
        project.commit("two")
        history = GitHistory(project.folder, build="echo hello; echo 'error: no compiler' >&2; echo more >&2; exit 3")
        with pytest.raises(NotMadeError, match=r"error: no compiler$"):
            history.python(history.span("HEAD~1", "HEAD").good)
        assert not [path for path in (tmp_path / "cache/candidates").iterdir() if path.is_dir()]

    def test_a_folder_that_a_revision_has_not_is_told(self, project: Project, golden: Golden) -> None:
        project.commit("one")
        project.commit("two")
        history = GitHistory(project.folder, paths=["lib"])
        with pytest.raises(NotMadeError) as raised:
            history.python(history.span("HEAD~1", "HEAD").good)
        golden(raised)

    def test_merges_are_one_change_where_that_is_asked_for(self, project: Project) -> None:
        first = project.commit("one")
        project.git("checkout", "-qb", "side")
        side = project.commit("side")
        project.git("checkout", "-q", "main")
        (project.folder / "other.py").write_text("")
        project.git("add", "-A")
        project.git("commit", "-qm", "two")
        project.git("merge", "-q", "--no-ff", "-m", "merge", "side")
        assert {one.name for one in GitHistory(project.folder).span(first, "HEAD").candidates} >= {side}
        line = GitHistory(project.folder, first_parent=True).span(first, "HEAD").candidates
        assert [one.subject for one in line] == ["two", "merge"]
        assert line[1].parents == (line[0].name,)

    @pytest.mark.parametrize(
        ("good", "bad", "said"),
        [
            ("HEAD", "main", r"--good HEAD and --bad main are the same commit, [0-9a-f]{12}$"),
            ("HEAD", "HEAD~1", "--good HEAD comes after --bad HEAD~1: exchange them"),
            ("other", "HEAD", r"--good other is no ancestor of --bad HEAD; both have [0-9a-f]{12}, which may serve"),
            ("none", "HEAD", "--good none: no such revision in "),
            ("HEAD~1", "--all", "--bad --all: no such revision in "),
        ],
    )
    def test_ends_that_cannot_be_are_refused(self, project: Project, good: str, bad: str, said: str) -> None:
        project.commit("one")
        project.git("checkout", "-qb", "other")
        project.commit("elsewhere")
        project.git("checkout", "-q", "main")
        project.commit("two")
        with pytest.raises(HistoryError, match=said):
            GitHistory(project.folder).span(good, bad)

    def test_a_folder_without_git_is_told_what_else_there_is(self, tmp_path: Path, golden: Golden) -> None:
        with pytest.raises(HistoryError) as raised:
            GitHistory(tmp_path).span("a", "b")
        golden(raised)

    def test_a_hook_of_git_that_runs_it_is_not_followed(
        self, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        project.commit("one")
        project.commit("two")
        monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
        assert len(GitHistory(project.folder).span("HEAD~1", "HEAD").candidates) == 1


class TestCommands:
    def test_each_version_has_its_own_and_words_with_spaces_stay_one(self, tmp_path: Path) -> None:
        home = tmp_path / "my envs"
        for version in ("1", "2"):
            (home / version).mkdir(parents=True)
            (home / version / "python").symlink_to(sys.executable)
        history = CommandHistory(f"env LLMPERF_SEEN={{version}} '{home}/{{version}}/python'", ["1", "2"])
        span = history.span("1", "2")
        ask = "import os; print(os.environ['LLMPERF_SEEN'])"
        for one in (span.good, *span.candidates):
            said = subprocess.run([history.python(one), "-c", ask], capture_output=True, text=True, check=True)
            assert said.stdout.strip() == one.name

    def test_files_of_another_folder_are_other_interpreters(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys = []
        for name in ("here", "there"):
            (tmp_path / name).mkdir()
            monkeypatch.chdir(tmp_path / name)
            keys.append(CommandHistory("envs/{version}/bin/python", ["1", "2"]).key)
        assert keys[0] != keys[1]

    @pytest.mark.parametrize(
        ("command", "versions", "said"),
        [
            ("/envs/torch/bin/python", ["1"], r"expected \{version\} in it"),
            ("'/envs/{version}", ["1"], "no command"),
            ("/envs/{version}/python", [], "--python needs --versions"),
        ],
    )
    def test_a_command_that_cannot_be_is_refused(self, command: str, versions: list[str], said: str) -> None:
        with pytest.raises(HistoryError, match=said):
            CommandHistory(command, versions)

    @pytest.mark.parametrize(
        ("good", "bad", "said"),
        [
            ("2.1", "2.9", "--bad 2.9: none of --versions 2.0,2.1,2.2"),
            ("2.2", "2.0", "which has the oldest first"),
            ("2.2", "2.2", "the same version"),
        ],
    )
    def test_ends_that_cannot_be_are_refused(self, good: str, bad: str, said: str) -> None:
        with pytest.raises(HistoryError, match=said):
            CommandHistory("x-{version}", ["2.0", "2.1", "2.2"]).span(good, bad)


class TestProbing:
    def test_one_without_torch_is_told(self, tmp_path: Path, golden: Golden) -> None:
        python = histories.script(tmp_path / "python", ['echo \'["torch", "accelerate"]\''])
        with pytest.raises(NotMadeError) as raised:
            probed(python)
        golden(raised)

    def test_one_that_has_all_is_taken(self, tmp_path: Path) -> None:
        python = histories.script(tmp_path / "python", ["echo '[]'"])
        assert probed(python) == python

    @pytest.mark.parametrize("line", ["echo 'sh: no such image' >&2; exit 1", "exit 1"])
    def test_one_that_does_not_run_is_told(self, tmp_path: Path, line: str, golden: Golden) -> None:
        with pytest.raises(NotMadeError) as raised:
            probed(histories.script(tmp_path / "python", [line]))
        golden(raised)
        with pytest.raises(NotMadeError) as raised:
            probed(str(tmp_path / "none"))
        golden(raised)

    def test_it_asks_what_a_launch_imports(self) -> None:
        said = subprocess.run([sys.executable, "-c", histories._PROBE], capture_output=True, text=True, check=True)
        assert set(json.loads(said.stdout)) <= {"torch", "transformers", "accelerate"}


def _runs(pid: int) -> bool:
    """Whether it does; nobody may have taken note of its end yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class TestPlaces:
    def test_one_that_was_broken_off_is_made_anew(self, tmp_path: Path) -> None:
        def broken(folder: Path) -> None:
            (folder / "half").write_text("")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            histories.made("git", ["a"], broken)
        folder = histories.made("git", ["a"], lambda folder: (folder / "whole").touch())
        assert sorted(path.name for path in folder.iterdir()) == ["complete", "whole"]
        # One that was killed leaves no mark either.
        (folder / "complete").unlink()
        assert (histories.made("git", ["a"], lambda folder: None) / "complete").exists()
        assert not (folder / "whole").exists()

    def test_what_takes_too_long_ends_with_all_that_it_has_started(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(histories, "_LONGEST", 0.5)
        begun = time.monotonic()
        # The shell's child holds its output: whoever ends the shell alone waits for it.
        with pytest.raises(NotMadeError, match="took more than"):
            histories.run(["sh", "-c", "sleep 60 & echo $! > pid; wait"], cwd=tmp_path)
        assert time.monotonic() - begun < 30
        child = int((tmp_path / "pid").read_text())
        until(lambda: not _runs(child))

    @pytest.mark.parametrize("said", ["fatal: write error: No space left on device", "ok\nerror: Disk quota exceeded"])
    def test_a_full_disk_is_told_apart_whoever_met_it(self, said: str) -> None:
        with pytest.raises(NoRoomError):
            histories.run(["sh", "-c", f"printf '{said}' >&2; exit 1"])

    def test_a_full_cache_is_told_apart(self, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
        def full(folder: Path) -> None:
            raise OSError(28, os.strerror(28))

        with pytest.raises(NoRoomError) as raised:
            histories.made("git", ["a"], full)
        golden(raised)
