"""A pytester project with the fake launcher, run in a process of its own as a user's would be."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import write_fake

REPOSITORY = Path(__file__).parents[2]

FOUR_LINES = """
import pytest

@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention(perf, train_spec):
    perf.check(train_spec)
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A user's project: one test file, and nothing else of ours."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    # Where temporary folders are inside some repository, it is none of the project's.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(pytester.path.parent))
    # Fakes train on nothing: they need not wait for what else trains on this host.
    monkeypatch.setenv("LLMPERF_LEASE_DIR", str(pytester.path.with_name(f"{pytester.path.name}-leases")))
    # What a run leaves in the user's state is no part of the project.
    monkeypatch.setenv("XDG_STATE_HOME", str(pytester.path.with_name(f"{pytester.path.name}-state")))
    monkeypatch.delenv("LLMPERF_CACHE_DIR", raising=False)
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID", "CI"):
        monkeypatch.delenv(name, raising=False)  # they tell the inner pytest that it is a worker
    pytester.makeconftest("from tests.fakes import install\n\ninstall()\n")
    pytester.makeini("[pytest]\n")
    pytester.makepyfile(test_mine=FOUR_LINES)
    return Project(pytester)


class Project:
    """What the tests do with it."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester, self.path = pytester, pytester.path
        self.state = pytester.path.with_name(f"{pytester.path.name}-state")

    def run(self, *options: str, gpus: str = "0") -> pytest.RunResult:
        return self.pytester.runpytest_subprocess("-p", "no:randomly", "--gpus", gpus, *options)

    def fake(self, **values: Any) -> None:
        """What launches yield from now on."""
        write_fake(self.path, **values)

    def record(self, **values: Any) -> None:
        """Baselines of every case with these figures. What one project has recorded serves all that are as it was."""
        self.fake(**values)
        kept = None if self.state.exists() else self.path.parent / f"recorded-{self._digest()}"
        if kept is not None and kept.exists():
            shutil.copytree(kept / "project", self.path, dirs_exist_ok=True)
            shutil.copytree(kept / "state", self.state)
            return
        assert self.run("--update-baselines", "--perf-reason", "start").ret == 0
        (self.path / "launches.txt").unlink()
        if kept is not None and self.state.exists():
            shutil.copytree(self.path, kept / "project", ignore=shutil.ignore_patterns("runpytest-*", "std*"))
            shutil.copytree(self.state, kept / "state")

    def _digest(self) -> str:
        """Of all that a run reads: its files, and the environment as seen from its folder."""
        files = {path: path.read_bytes() for path in sorted(self.path.rglob("*")) if path.is_file()}
        told = [f"{path.relative_to(self.path)} {path.stat().st_mode} {content!r}" for path, content in files.items()]
        told += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name != "PYTEST_CURRENT_TEST"]
        text = "\n".join(told).replace(str(self.path), "HERE").replace(self.path.name, "NAME")
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def launches(self) -> list[str]:
        path = self.path / "launches.txt"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def baselines(self) -> list[Path]:
        return sorted((self.path / "baselines").rglob("*.json"))

    def results(self, *options: str) -> dict[str, Any]:
        """The results of a run by case id."""
        self.run("--perf-json", "out.json", *options)
        document = json.loads((self.path / "out.json").read_text())
        return {result["id"]: result for result in document["results"]}
