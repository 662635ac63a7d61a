"""The documentation's commands that need torch, as a reader would give them: what they print is what the pages show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.documentation.blocks import REPOSITORY, SHELLS, Block, blocks_of, steps
from tools.documentation.blocks import pages as all_pages
from tools.documentation.printed import differences, folder_for_commands, printed_by, without_figures

PAGE = REPOSITORY / "docs" / "tutorial.md"
#: A launch of the tiny model takes ten seconds on two quiet cores.
SECONDS = 240
#: What the page does to a training for its first failure.
SLOWED = "LLMPERF_INJECT=slow"


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.wide
def test_the_tutorial_goes_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)  # as a reader has it
    for block in (each for each in blocks_of(PAGE) if each.origin == "tutorial"):
        if block.language in SHELLS:
            _follow(block, tmp_path)
        else:
            file = tmp_path / "here" / block.detail
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")


def test_the_tutorial_has_no_other_page() -> None:
    assert {block.page for path in all_pages() for block in blocks_of(path) if block.origin == "tutorial"} == {PAGE}


def _follow(block: Block, folder: Path) -> None:
    commands = steps(block)
    for number, (command, shown) in enumerate(commands, start=1):
        done = _run(command, folder)
        if done.returncode and "regressed: tokens_per_second_per_gpu" in done.stdout and SLOWED not in command:
            done = _run(command, folder)  # a reader is alone: beside these tests a step was once five times as long
        fails = block.detail == "fails" and number == len(commands)
        assert bool(done.returncode) == fails, f"{block.place}: {command}\n{done.stdout}\n{done.stderr}"
        missing = differences(shown, done.stdout, without_figures)
        assert not missing, f"{block.place}: {command} did not print\n{missing}\n\nbut\n{done.stdout}"


def _run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder / "here",
        env=_environment(folder),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def _environment(folder: Path) -> dict[str, str]:
    """A reader's: nothing of this pytest's own, and nothing that a reader's home would keep."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "LLMPERF", "GIT_"))}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "LLMPERF_CACHE_DIR": str(folder / "cache"),
        "LLMPERF_LEASE_DIR": str(folder / "leases"),
        "COLUMNS": "400",
        **{f"GIT_{who}_{what}": "reader@site" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }


TORCH = sorted({b.page for path in all_pages() for b in blocks_of(path) if (b.origin, b.detail) == ("run", "torch")})


@pytest.mark.torchrun
@pytest.mark.wide
@pytest.mark.parametrize("page", TORCH, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_what_is_run_with_torch_prints_what_is_shown(page: Path, tmp_path: Path) -> None:
    folder = folder_for_commands(tmp_path)
    for block in blocks_of(page):
        for command, shown in steps(block) if (block.origin, block.detail) == ("run", "torch") else ():
            again = f"{block.place}: python -m tools.documentation writes it again"
            assert not differences(shown, printed_by(command, folder)), again
