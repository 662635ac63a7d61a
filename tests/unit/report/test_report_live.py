"""The live line and the lines of a log."""

from __future__ import annotations

import dataclasses
import io
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_llmperf.records.failure import Progress
from pytest_llmperf.report.text import LaunchLines, Numbered, live_line
from tests.golden import Golden
from tests.unit.report.test_report_failure import launch_of

SPEC_ID = "llama-3.2-1b-bf16-sdpa-liger-mbs37-gpus1"
TRAINING = Progress(phase="training", step=12, steps=40, tokens_per_second=71783, reserved_bytes=int(52.6 * 2**30))


def test_a_wide_terminal_shows_everything(golden: Golden) -> None:
    golden(live_line(Numbered(SPEC_ID, 1, 2), TRAINING, 14.9, 120, "utf-8"))


def test_the_id_gives_way_first_and_in_its_middle(golden: Golden) -> None:
    golden(live_line(Numbered(SPEC_ID, 1, 2), TRAINING, 14.9, 80, "utf-8"))


def test_a_phase_before_training_stands_for_the_steps() -> None:
    line = live_line(Numbered(SPEC_ID, 1, 1), Progress(phase="importing"), 3.2, 120, "utf-8")
    assert line == f"{SPEC_ID}  launch 1/1  importing  3 s"


FIRST = Progress(phase="training", step=0, steps=40, phase_seconds=12.4, compiles=True)


@pytest.mark.parametrize(
    ("progress", "told"),
    [
        (FIRST, "first step for 12 s: it compiles kernels"),
        (dataclasses.replace(FIRST, compiles=False), "first step for 12 s: no optimizer has stepped yet"),
        (dataclasses.replace(FIRST, phase_seconds=5.0), "step 0/40"),
        (dataclasses.replace(FIRST, step=1, phase_seconds=300.0), "step 1/40"),
        (dataclasses.replace(FIRST, phase="building"), "building"),
    ],
)
def test_a_first_step_that_takes_long_says_what_it_does(progress: Progress, told: str) -> None:
    assert live_line(Numbered(SPEC_ID, 1, 1), progress, 14.9, 120, "utf-8") == f"{SPEC_ID}  launch 1/1  {told}  14 s"


def test_an_ascii_terminal_gets_ascii() -> None:
    line = live_line(Numbered(SPEC_ID, 1, 2), TRAINING, 14, 80, "ascii")
    assert line.isascii()
    assert "..." in line


@given(
    st.text(max_size=90),
    st.builds(
        Progress,
        phase=st.sampled_from(["starting", "importing", "building", "training"]),
        step=st.integers(0, 10**6),
        steps=st.integers(0, 10**6),
        tokens_per_second=st.floats(allow_nan=True),
        reserved_bytes=st.integers(0, 2**45),
    ),
    st.floats(allow_nan=True),
    st.integers(0, 200),
)
def test_a_live_line_is_shorter_than_the_terminal(spec_id: str, progress: Progress, seconds: float, width: int) -> None:
    line = live_line(Numbered(spec_id, 1, 3), progress, seconds, width, "utf-8")
    assert len(line) <= max(width - 1, 0)
    assert len(line.splitlines()) <= 1


@pytest.mark.parametrize("width", range(20, 130))
def test_the_step_outlives_the_other_figures(width: int) -> None:
    assert "step 12/40" in live_line(Numbered(SPEC_ID, 1, 2), TRAINING, 14, width, "utf-8")


def test_a_log_gets_two_lines(golden: Golden) -> None:
    launch = dataclasses.replace(launch_of(2), wall_seconds=34.4)
    said: list[str] = []
    lines = LaunchLines(Numbered(SPEC_ID, 1, 2), say=said.append, write=None)
    lines.update(Progress(phase="building"))
    lines.finished(launch)
    golden(said)


def test_a_log_hears_every_half_minute_of_a_launch_that_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    now = [0.0]
    monkeypatch.setattr("pytest_llmperf.report.text.time.monotonic", lambda: now[0])
    lines = LaunchLines(Numbered(SPEC_ID, 1, 2), say=said.append, write=None)
    for second in range(0, 71, 5):
        now[0] = float(second)
        lines.update(Progress(phase="building" if second < 50 else "training", step=3, steps=40))
    assert said == [
        f"{SPEC_ID}: launch 1/2 started",
        f"{SPEC_ID}: launch 1/2: building, 30 s",
        f"{SPEC_ID}: launch 1/2: step 3/40, 60 s",
    ]


class Screen:
    """Collects what is written, at a time and a width that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written: list[str] = []
        self.now = 0.0
        self.columns = 80
        module = "pytest_llmperf.report.text"
        monkeypatch.setattr(f"{module}.time.monotonic", lambda: self.now)
        monkeypatch.setattr(f"{module}.shutil.get_terminal_size", lambda: os.terminal_size((self.columns, 24)))
        self.lines = LaunchLines(Numbered(SPEC_ID, 1, 2), say=self.written.append, write=self.written.append)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    return Screen(monkeypatch)


def test_the_line_is_rewritten_in_place_and_cleared(screen: Screen) -> None:
    screen.lines.update(TRAINING)
    screen.lines.finished(launch_of(2))
    assert screen.written == [f"\r{live_line(Numbered(SPEC_ID, 1, 2), TRAINING, 0.0, 80, 'utf-8')}\x1b[K", "\r\x1b[K"]


def test_a_terminal_is_written_what_it_can_show(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.__stdout__", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    screen.lines.update(TRAINING)
    assert b"..." in screen.written[0].encode("latin-1")


def test_updates_are_at_most_five_a_second(screen: Screen) -> None:
    for tick in range(100):
        screen.now = tick / 100
        screen.lines.update(TRAINING)
    assert len(screen.written) == 5


def test_clearing_writes_nothing_where_nothing_was_shown(screen: Screen) -> None:
    screen.lines.clear()
    screen.lines.update(TRAINING)
    screen.lines.clear()
    screen.lines.clear()
    assert len(screen.written) == 2


def test_a_line_wider_than_a_resized_terminal_is_cut(screen: Screen) -> None:
    screen.columns = 5
    screen.lines.update(Progress(phase="123456\n789"))
    assert screen.written == ["\r1234\x1b[K"]
