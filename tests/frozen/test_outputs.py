"""What a run writes, for each word of a verdict: measured by the fake launcher, so that only the judge decides."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import groupby
from typing import Any

import pytest

from tests.frozen.house import main
from tests.golden import Golden
from tests.plugin.conftest import Project

#: Each case by its sequence length, and what its launches yield when they are judged.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "pass": (16, {}),
    "slower": (32, {"step_seconds": 0.9}),
    "larger": (48, {"reserved_bytes": 2**31}),
    "improved": (64, {"reserved_bytes": 2**28}),
    "changed": (80, {"loss": 6.0001, "evidence": {"setup": {"dropout": {"LlamaAttention.attention_dropout": 0.3}}}}),
    "inconclusive": (96, {"step_seconds": 0.101}),
    "invalid": (112, {"evidence": {"attention": "eager"}}),
    "spoilt": (128, {"foreign_processes": ["pid 7"]}),
    "failed": (144, {"fail": "oom"}),
    "unknown": (160, {}),
}
TESTS = f"""
import pytest
from pytest_llmperf import TrainSpec

CASES = { ({name: length for name, (length, _) in CASES.items()})!r}

@pytest.mark.parametrize("name", CASES)
def test_case(perf, name):
    tolerance = 0.01 if name == "inconclusive" else None
    spec = TrainSpec(
        model="llama-tiny", sequence_length=CASES[name], steps=20, min_steps=12, throughput_tolerance=tolerance
    )
    perf.check(spec)

@pytest.mark.skip(reason="not today")
def test_skipped(perf): ...

def test_wide(perf):
    perf.check(TrainSpec(model="llama-tiny", gpus=64))
"""
FILES = ("--perf-json=out.json", "--perf-report=out.html", "--perf-markdown=out.md", "--junit-xml=out.xml")
COMMANDS = (
    "baselines list",
    "baselines show llama-tiny-bf16-sdpa-seq16-mbs1-gpus1",
    "merge out.json --json merged.json",
)


@pytest.fixture
def judged(project: Project) -> Project:
    """A project whose cases are recorded, all but one, and whose next launches are judged."""
    project.pytester.makepyfile(test_mine=TESTS)
    project.fake(evidence={"setup": {"dropout": {}}})
    project.run("-k", "not unknown", "--update-baselines", "--perf-reason=start")
    usual: dict[str, Any] = {"evidence": {"setup": {"dropout": {}}}}
    project.fake(by={f"-seq{length}-": {**usual, **values} for length, values in CASES.values()})
    return project


def test_what_a_judged_run_writes(judged: Project, golden: Golden, capsys: pytest.CaptureFixture[str]) -> None:
    printed = judged.run(*FILES).stdout.str()
    found = {
        name: judged.path.joinpath(name).read_text(encoding="utf-8") for name in ("out.json", "out.html", "out.md")
    }
    golden.check_json("judged.json", plain(json.loads(steady(judged, found["out.json"]))))
    golden.check("judged-terminal.txt", steady(judged, printed.partition("collected ")[2]))
    golden.check("judged-page.txt", steady(judged, text_of(found["out.html"])))
    golden.check("judged.md", steady(judged, found["out.md"]))
    junit = judged.path.joinpath("out.xml").read_text(encoding="utf-8")
    golden.check("judged-junit.xml", steady(judged, junit.replace("><", ">\n<")))
    judged.pytester.chdir()
    capsys.readouterr()
    for command in COMMANDS:
        main(command.split())
        golden.check(f"llmperf-{'-'.join(command.split()[:2])}.txt", steady(judged, "".join(capsys.readouterr())))


def test_what_a_recording_run_writes(project: Project, golden: Golden) -> None:
    project.pytester.makepyfile(test_mine=TESTS)
    printed = project.run(
        "-k", "pass or skipped or wide", "--update-baselines", "--perf-reason=start", *FILES
    ).stdout.str()
    golden.check_json(
        "recorded.json",
        plain(json.loads(steady(project, project.path.joinpath("out.json").read_text(encoding="utf-8")))),
    )
    golden.check("recorded-terminal.txt", steady(project, printed.partition("collected ")[2]))
    (baseline,) = project.baselines
    golden.check("recorded-baseline.json", steady(project, baseline.read_text(encoding="utf-8")))


def test_what_a_dry_run_writes(judged: Project, golden: Golden) -> None:
    printed = judged.run("--perf-dry-run", *FILES).stdout.str()
    golden.check_json(
        "planned.json", plain(json.loads(steady(judged, judged.path.joinpath("out.json").read_text(encoding="utf-8"))))
    )
    golden.check("planned-terminal.txt", steady(judged, printed.partition("collected ")[2]))


def test_what_a_strict_run_prints(judged: Project, golden: Golden) -> None:
    printed = judged.run("--perf-strict", "-k", "improved or changed or inconclusive").stdout.str()
    golden.check("strict-terminal.txt", steady(judged, printed.partition("collected ")[2]))


#: What differs from run to run: when, where, how long, and by which versions.
_MOVING = (
    (r"20(?!26-0)\d\d-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)?([+-]\d\d:\d\d|Z| UTC)?)?", "TIME"),
    (r"\b[0-9a-f]{40}\b", "REVISION"),
    (r"\b20\d{6}-\d{6}-\d+\b", "RUN"),
    (r"(?m)^(llmperf_run_timestamp_seconds) .*", r"\1 TIME"),
    (r"\bin \d+\.\d\ds\b", "in N s"),
    (r"(\d\d)\.\d s in (\d+ launch)", r"\1 s in \2"),  # on a busy machine a launch waits for its turn
    (r"-{3,} generated xml file", "- generated xml file"),
    (r"[^\s>\"]*/pytest_llmperf/\w+(/\w+)*\.py:\d+", "OURS"),
    (r"--basetemp=\S+ ", ""),
    (r"={3,}", "==="),
    (r' (time|timestamp|hostname)="[^"]*"', r' \1=""'),
    (r"pytest-llmperf \d[\w.+]*", "pytest-llmperf VERSION"),
)
_MOVING_FIELDS = ("waiting_for_hardware", "baselines_digest")


def steady(project: Project, text: str) -> str:
    """``text`` without what differs from run to run."""
    text = text.replace(str(project.path), "FOLDER").replace(str(project.state), "STATE")
    for pattern, instead in _MOVING:
        text = re.sub(pattern, instead, text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def plain(value: Any) -> Any:
    """``value`` without what was waited, and with each long row of equal numbers as one word."""
    if isinstance(value, dict):
        whole = {
            name: round(each) if name == "seconds" and isinstance(each, float) else each for name, each in value.items()
        }
        return {name: plain(each) for name, each in whole.items() if name not in _MOVING_FIELDS}
    if not isinstance(value, list):
        return value
    if len(value) > 4 and all(isinstance(each, int | float) for each in value):
        return " ".join(f"{len(list(group))}×{number}" for number, group in groupby(value))
    return [plain(each) for each in value]


class _Words(HTMLParser):
    """The words of a page, a line for each piece of text; without pictures, styles and scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._left_out: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in ("style", "script", "svg"):
            self._left_out.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._left_out and tag == self._left_out[-1]:
            self._left_out.pop()

    def handle_data(self, data: str) -> None:
        if data.strip() and not self._left_out:
            self.lines.append(" ".join(data.split()))


def text_of(html: str) -> str:
    words = _Words()
    words.feed(html)
    return "\n".join(words.lines)
