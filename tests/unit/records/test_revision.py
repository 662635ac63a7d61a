"""What is known of the tree that ran: its commit, and what is in none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pytest_llmperf.run.history import Revision, find_revision


class TestRevision:
    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        root = tmp_path / "work tree"
        (root / "tests").mkdir(parents=True)
        (root / "kernel.py").write_text("")
        (root / ".gitignore").write_text("ignored*\n")
        git(root, "init", "-q")
        git(root, "add", ".")
        git(root, "-c", "user.name=n", "-c", "user.email=e@e", "commit", "-qm", "m")
        return root

    @pytest.mark.parametrize("name", ["new.py", "pyproject.toml", "setup.cfg", "models/config.json", "tests/fast.cu"])
    def test_a_new_source_or_configuration_is_a_change(self, checkout: Path, name: str) -> None:
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text("")
        assert find_revision(checkout, checkout / "baselines").changed == (name,)

    def test_what_a_run_leaves_is_none(self, checkout: Path) -> None:
        for name in ("out.json", "report.html", "ignored.py", "baselines/config.json", ".venv/site-packages/a.py"):
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            (checkout / name).write_text("")
        assert find_revision(checkout, checkout / "baselines").changed == ()

    def test_an_environment_in_the_tree_is_none(self, checkout: Path) -> None:
        for name in ("v/pyvenv.cfg", "v/bin/activate_this.py", "site/own.py"):
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            (checkout / name).write_text("")
        assert find_revision(checkout, checkout / "baselines").changed == ("site/own.py",)

    def test_of_another_folder_of_the_checkout_nothing_is_asked(self, checkout: Path) -> None:
        (checkout / "new.py").write_text("")
        assert find_revision(checkout / "tests", checkout / "baselines").changed == ()

    def test_before_the_first_commit_nothing_is_committed(self, tmp_path: Path) -> None:
        (tmp_path / "new.py").write_text("")
        git(tmp_path, "init", "-q")
        assert find_revision(tmp_path, tmp_path / "baselines") == Revision("", ("new.py",))


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=root, check=True)
