"""A project's name in a history: the same for each of its clones, and without its credentials."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pytest_llmperf.run.history import project_of


@pytest.mark.parametrize(
    "url",
    [
        "https://host/a/b.git",
        "https://user:secret@host/a/b.git",
        "https://user:sec@ret@host/a/b.git",
        "git@host:a/b.git",
        "ssh://git@host/a/b/",
        "https://host/a/b.git?token=secret",
    ],
)
def test_a_remote_is_one_project_however_it_is_written(tmp_path: Path, url: str) -> None:
    for command in (["init", "-q"], ["remote", "add", "origin", url]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    (tmp_path / "tests").mkdir()
    assert project_of(tmp_path / "tests") == "host/a/b"


def test_without_one_it_is_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "tests").mkdir()
    assert project_of(tmp_path / "tests") == str(tmp_path / "tests")
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q"], check=True)
    assert project_of(tmp_path / "tests") == str(tmp_path)
