"""``llmperf baselines merge`` in real repositories: git's merge driver, and files that are in conflict already."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.cli import main
from pytest_llmperf.judge.baseline import Baseline
from pytest_llmperf.judge.baseline_file import Accepted
from pytest_llmperf.judge.batch_size_baseline import METRIC, CapacityBaseline
from pytest_llmperf.judge.policy import METRICS
from pytest_llmperf.judge.static.stored_step import StepBaseline, StoredStep
from pytest_llmperf.records.static_step import StaticStep
from pytest_llmperf.spec.train_spec import TrainSpec
from tests.fakes import STEP, Fake, launch_of

REPOSITORY = Path(__file__).parents[3]
SPEC = TrainSpec(model="llama-tiny", sequence_length=64, steps=12, warmup_steps=4)
CASE = "baselines/m/llama-tiny/a case.json"
CAPACITY = "baselines/m/llama-tiny/capacity/case.json"
STATIC = "baselines/static/case.json"
DRIVER = f"{shlex.quote(sys.executable)} -m pytest_llmperf.cli baselines merge %O %A %B %P"

KEPT: dict[str, Any] = {"machine": "m", "spec": SPEC.to_dict(), "recorded_by": "t.py::t"}


def at(day: int, metrics: dict[str, float]) -> Accepted:
    return Accepted(recorded_at=f"2026-01-{day:02}T00:00:00Z", reason="", launches=1, metrics=metrics)


def case(steps: dict[int, float], replaced: bool = False) -> str:
    """A baseline to which a launch with this step time was added on each of these days; or the last one took over."""
    runs = [launch_of(SPEC, Fake(step_seconds=step)) for step in steps.values()]
    each = [{name: metric.of([run]) for name, metric in METRICS.items()} for run in runs]
    history = tuple(map(at, steps, each))
    kept = tuple(runs[-1:] if replaced else runs)
    return Baseline(**KEPT, id=SPEC.id, digest=SPEC.digest, launches=kept, anchor=history[0], history=history).to_json()


def capacity(sizes: dict[int, int]) -> str:
    history = tuple(at(day, {METRIC: size}) for day, size in sizes.items())
    return CapacityBaseline(
        **KEPT, id=SPEC.capacity_id, digest=SPEC.capacity_digest, anchor=history[0], history=history
    ).to_json()


def static(day: int, copies: int) -> str:
    """The file of a case that nobody has launched: so many copies a step, accepted on this day."""
    step = StaticStep(**{**STEP, "operators": {**STEP["operators"], "aten::_to_copy": copies}})
    stored = StoredStep(step=step, recorded_at=f"2026-01-{day:02}T00:00:00Z")
    kept = {name: value for name, value in KEPT.items() if name != "machine"}
    return StepBaseline(**kept, id=SPEC.id, digest=SPEC.digest, static=stored).to_json()


class Checkout:
    """A repository with a branch ``main`` and another one, ``theirs``, that begins at its first commit."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q", "-b", "main")
        for name, value in (("user.name", "n"), ("user.email", "e@e"), ("commit.gpgsign", "false")):
            self.git("config", name, value)

    def git(self, *arguments: str, code: int = 0) -> str:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "LC_ALL": "C"}
        done = subprocess.run(
            ["git", *arguments], cwd=self.root, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def set_up_driver(self) -> None:
        (self.root / ".gitattributes").write_text("baselines/**/*.json merge=llmperf\n")
        self.git("config", "merge.llmperf.driver", DRIVER)

    def commit(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.git("add", "-A")
        self.git("commit", "-qm", "m")

    def diverge(self, base: dict[str, str], ours: dict[str, str], theirs: dict[str, str]) -> None:
        self.commit({"README": "", **base})
        self.git("checkout", "-qb", "theirs")
        self.commit(theirs)
        self.git("checkout", "-q", "main")
        self.commit(ours)

    def text(self, name: str) -> str:
        return (self.root / name).read_text()

    def state(self, name: str) -> str:
        return self.git("status", "--porcelain", name)[:2]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.processes
class TestDriver:
    @pytest.fixture(autouse=True)
    def _set_up(self, checkout: Checkout) -> None:
        checkout.set_up_driver()

    def test_git_merges_what_both_branches_accepted(self, checkout: Checkout) -> None:
        checkout.diverge(
            {CASE: case({1: 0.1}), CAPACITY: capacity({1: 8})},
            {CASE: case({1: 0.1, 4: 0.104}), CAPACITY: capacity({1: 8, 2: 8})},
            {CASE: case({1: 0.1, 2: 0.102, 3: 0.103}), CAPACITY: capacity({1: 8, 3: 9})},
        )
        checkout.git("merge", "theirs", "--no-edit")
        assert checkout.git("status", "--porcelain") == ""
        assert checkout.text(CASE) == case({1: 0.1, 2: 0.102, 3: 0.103, 4: 0.104})
        assert checkout.text(CAPACITY) == capacity({1: 8, 2: 8, 3: 9})

    @pytest.mark.parametrize(
        ("base", "ours", "theirs", "merged"),
        [
            (static(1, 26), static(4, 26), static(3, 58), static(3, 58)),
            (static(1, 26), static(2, 58), static(3, 26), static(2, 58)),
            (static(1, 26), static(2, 58), static(3, 58), static(3, 58)),
            (None, static(2, 26), static(3, 26), static(3, 26)),
        ],
        ids=["theirs", "ours", "both alike", "both first"],
    )
    def test_static_figures_are_those_of_the_branch_that_changed_the_step(
        self, checkout: Checkout, base: str | None, ours: str, theirs: str, merged: str
    ) -> None:
        checkout.diverge({STATIC: base} if base else {}, {STATIC: ours}, {STATIC: theirs})
        checkout.git("merge", "theirs", "--no-edit")
        assert checkout.text(STATIC) == merged

    def test_so_does_a_rebase(self, checkout: Checkout) -> None:
        checkout.diverge(
            {CASE: case({1: 0.1})}, {CASE: case({1: 0.1, 4: 0.104})}, {CASE: case({1: 0.1, 2: 0.102, 3: 0.103})}
        )
        checkout.git("rebase", "theirs")
        assert checkout.text(CASE) == case({1: 0.1, 2: 0.102, 3: 0.103, 4: 0.104})

    def test_a_case_that_both_branches_recorded_first(self, checkout: Checkout) -> None:
        checkout.diverge({}, {CASE: case({2: 0.1})}, {CASE: case({1: 0.101})})
        checkout.git("merge", "theirs", "--no-edit")
        assert checkout.text(CASE) == case({1: 0.101, 2: 0.1})

    def test_branches_that_met_before_in_conflict_have_no_one_base(self, checkout: Checkout) -> None:
        checkout.diverge({CASE: case({1: 0.1})}, {CASE: case({1: 0.1, 4: 0.104})}, {CASE: case({1: 0.1, 3: 0.103})})
        both = case({1: 0.1, 3: 0.103, 4: 0.104})
        checkout.git("branch", "old")
        checkout.git("merge", "theirs", "--no-edit")
        checkout.git("checkout", "-q", "theirs")
        checkout.git("merge", "old", "--no-edit")  # criss-cross: git merges the bases first
        checkout.commit({CASE: case({1: 0.1, 3: 0.103, 4: 0.104, 6: 0.106})})
        checkout.git("checkout", "-q", "main")
        assert checkout.text(CASE) == both
        checkout.commit({CASE: case({1: 0.1, 3: 0.103, 4: 0.104, 5: 0.105})})
        checkout.git("merge", "theirs", "--no-edit")
        assert checkout.text(CASE) == case({1: 0.1, 3: 0.103, 4: 0.104, 5: 0.105, 6: 0.106})

    @pytest.mark.parametrize(
        ("name", "sides", "said"),
        [
            (
                CASE,
                (case({1: 0.1}), case({1: 0.1, 2: 0.05}, replaced=True), case({1: 0.1, 3: 0.5}, replaced=True)),
                "tokens_per_second_per_gpu was accepted as 1,280 tokens/s in ours, 128 tokens/s in theirs; take one",
            ),
            (
                CAPACITY,
                (capacity({1: 8}), capacity({1: 8, 2: 9}), capacity({1: 8, 3: 10})),
                "max_micro_batch_size was accepted as 9 in ours, 10 in theirs; take one side",
            ),
            (
                STATIC,
                (static(1, 26), static(2, 58), static(3, 60)),
                "ours and theirs accepted another step each; take one side",
            ),
            (STATIC, (static(1, 26), static(2, 58), case({1: 0.1})), f"{STATIC} (theirs): "),
            (CASE, (case({1: 0.1}), case({1: 0.1, 2: 0.1}), '{"schema": 1'), f"{CASE} (theirs): not JSON"),
            (CASE, (case({1: 0.1}), "", case({1: 0.1, 2: 0.1})), f"{CASE} (ours): the file is empty"),
            (CASE, (case({1: 0.1}), case({1: 0.1, 2: 0.1}), capacity({1: 8})), f"{CASE} (theirs): it has no"),
            (CASE, (case({1: 0.1}), case({1: 0.1, 2: 0.1}), '{"schema": 2}'), "(theirs): schema 2 is newer"),
        ],
        ids=["speed", "size", "step", "no step", "theirs broken", "ours empty", "another kind", "newer"],
    )
    def test_what_cannot_be_one_is_a_conflict_with_its_reason(
        self, checkout: Checkout, name: str, sides: tuple[str, str, str], said: str
    ) -> None:
        checkout.diverge(*({name: text} for text in sides))
        printed = checkout.git("merge", "theirs", "--no-edit", code=1)
        (line,) = (line for line in printed.splitlines() if line.startswith("llmperf: "))
        assert said in line
        assert f"CONFLICT (content): Merge conflict in {name}" in printed
        assert checkout.state(name) == "UU"
        # Nobody can take it for a baseline, and git still has all three.
        assert checkout.text(name).splitlines()[0] == "<<<<<<< ours"
        checkout.git("checkout", "--theirs", name)
        assert checkout.text(name) == sides[-1]


class TestFileInConflict:
    @pytest.fixture(autouse=True)
    def _within(self, checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(checkout.root)

    def test_it_is_resolved_from_what_git_has_of_it(
        self, checkout: Checkout, capsys: pytest.CaptureFixture[str]
    ) -> None:
        checkout.diverge({CASE: case({1: 0.1})}, {CASE: case({1: 0.1, 3: 0.103})}, {CASE: case({1: 0.1, 2: 0.102})})
        checkout.git("merge", "theirs", code=1)
        assert "<<<<<<<" in checkout.text(CASE)
        assert main(["baselines", "merge", CASE]) == 0
        assert capsys.readouterr().out == f"{CASE}: merged, look at it and git add it\n"
        assert checkout.text(CASE) == case({1: 0.1, 2: 0.102, 3: 0.103})
        checkout.git("add", CASE)
        checkout.git("commit", "-qm", "merged")

    def test_a_largest_micro_batch_that_both_began_and_from_another_folder(
        self, checkout: Checkout, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkout.diverge({}, {CAPACITY: capacity({2: 8})}, {CAPACITY: capacity({1: 8})})
        checkout.git("merge", "theirs", code=1)
        monkeypatch.chdir(checkout.root / "baselines")
        assert main(["baselines", "merge", CAPACITY.removeprefix("baselines/")]) == 0
        assert checkout.text(CAPACITY) == capacity({1: 8, 2: 8})

    def test_what_cannot_be_one_stays_as_it_is(self, checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
        checkout.diverge({}, {CASE: case({1: 0.1})}, {CASE: case({2: 9.0})})
        checkout.git("merge", "theirs", code=1)
        before = checkout.text(CASE)
        assert main(["baselines", "merge", CASE]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"llmperf: {SPEC.id}: tokens_per_second_per_gpu was accepted as")
        assert checkout.text(CASE) == before

    @pytest.mark.parametrize("committed", [True, False])
    def test_one_that_is_in_none_is_a_line(
        self, checkout: Checkout, capsys: pytest.CaptureFixture[str], committed: bool
    ) -> None:
        if committed:
            checkout.commit({CASE: case({1: 0.1})})
        assert main(["baselines", "merge", CASE]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{CASE}: git has no two sides of it, expected a file that both branches changed" in line

    def test_without_git_it_says_so(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert main(["baselines", "merge", CASE]) == 1
        assert "git cannot be asked for its sides" in capsys.readouterr().err


@pytest.mark.parametrize("files", [[], ["a", "b"], ["a", "b", "c", "d", "e"]])
def test_other_numbers_of_files_are_a_usage_error(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["baselines", "merge", *files])
    assert ended.value.code == 2
    assert "FILE" in capsys.readouterr().err


def test_a_side_that_is_gone_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["baselines", "merge", *(str(tmp_path / name) for name in "oab")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "No such file" in line


def test_a_side_that_is_no_text_leaves_both_as_they_are(tmp_path: Path) -> None:
    for name, content in (("o", b""), ("a", b"\xff"), ("b", json.dumps({}).encode())):
        (tmp_path / name).write_bytes(content)
    assert main(["baselines", "merge", *(str(tmp_path / name) for name in "oab")]) == 1
    assert (tmp_path / "a").read_bytes() == b"<<<<<<< ours\n\xff\n=======\n{}\n>>>>>>> theirs\n"
