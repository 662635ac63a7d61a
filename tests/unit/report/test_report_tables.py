"""``llmperf report --tables``: the chapter's tables of what is stored, and tables that leave the terminal."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pytest_llmperf.analysis import ladder
from pytest_llmperf.analysis.ladder import Rung
from pytest_llmperf.cli import answer
from pytest_llmperf.cli.answer import Screen
from pytest_llmperf.cli.baseline_folder import Shelf
from pytest_llmperf.cli.commands import report as command
from pytest_llmperf.judge.baseline import BaselineStore
from pytest_llmperf.report.text import Column, escaped, markdown
from pytest_llmperf.settings.train_spec import TrainSpec
from tests.golden import Golden
from tests.shelf import Run, baseline_at, keep, llmperf_on

REPOSITORY = Path(__file__).parents[3]
# Tokens/s by which the speed-ups are round: 15.3 is 4 times 15.1, 15.4 twice 15.3.
RATES = {"15.1": 1000.0, "15.3": 4000.0, "15.4": 8000.0, "15.8": 16000.0, "15.9": 20000.0}


def keep_rungs(root: Path, rungs: Iterable[Rung], machine: str = "m") -> None:
    for rung in rungs:
        if rung.number in RATES and not rung.ran_out_of_memory:
            keep(root, baseline_at(rung.spec, RATES[rung.number], machine, gib=10))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    keep_rungs(tmp_path, ladder.LLAMA)
    return tmp_path


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str], root: Path) -> Run:
    return partial(llmperf_on(root, capsys), "report --tables")


def squeezed(text: str) -> list[str]:
    return [re.sub(r" +", " ", line) for line in text.splitlines()]


class TestText:
    def test_ours_stands_beside_the_published(self, report: Run, golden: Golden) -> None:
        code, out, err = report()
        lines = squeezed(out)
        assert (code, err) == (0, "")
        golden(lines[:3])
        golden(lines[4])
        golden(lines[6])
        golden(lines[12])

    def test_a_rung_without_a_baseline_is_a_dash_and_one_that_did_not_fit_says_so(
        self, report: Run, golden: Golden
    ) -> None:
        lines = squeezed(report()[1])
        golden(lines[5])
        golden(lines[10])
        golden(lines)

    def test_a_ladder_of_which_two_rungs_were_published(self, report: Run, root: Path, golden: Golden) -> None:
        keep_rungs(root, ladder.OPT)
        out = report()[1]
        golden(out)
        assert out.count("\nllama-3.2-1b, ") == out.count("\nopt-1.3b, ") == 1

    @pytest.mark.parametrize("width", [1, 20, 40, 80, 100, 200])
    def test_a_narrow_terminal_loses_nothing(self, root: Path, width: int) -> None:
        lines = command.page("m", command.ladders(Shelf.read(root)), [], Screen(width))
        kept = "".join(lines).replace(" ", "")
        for figure in ("10,485", "20,000", "61.9GiB", "15.9"):
            assert figure in kept
        if width >= 80:
            tables = [line for line in lines if not line.startswith(("published", "llama"))]
            assert max(map(len, tables)) <= width

    def test_what_is_stored_here(self, report: Run) -> None:
        """By hand from the stored launches: 71.5k over 5.69k tokens/s, 52.57 GiB."""
        code, out, err = report("--perf-baselines", REPOSITORY / "baselines", "--machine", "nvidia-h200-140gib")
        lines = squeezed(out)
        assert (code, err) == (0, "")
        best = next(line for line in lines if line.startswith("15.9 37 ")).split()
        assert float(best[6].replace(",", "")) == pytest.approx(71_600, rel=0.03)
        assert float(best[10]) == pytest.approx(71_600 / 5_690, rel=0.03)
        assert best[12:] == ["52.6", "GiB", "62.3", "GiB"]
        assert "no baseline here" not in out

    def test_nothing_heavy_is_imported(self) -> None:
        heavy = {"torch", "transformers", "accelerate", "numpy", "scipy", "pytest", "pynvml"}
        code = (
            "import sys; from pytest_llmperf.cli import main\n"
            "code = main(['report', '--tables', '--machine', 'nvidia-h200-140gib', '--format', 'markdown'])\n"
            f"print(sorted({heavy!r} & sys.modules.keys()), code)"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, text=True, capture_output=True, check=False)
        assert done.stdout.splitlines()[-1] == "[] 0"


class TestDocuments:
    def test_markdown(self, report: Run, golden: Golden) -> None:
        code, out, _ = report("--format", "markdown")
        rows = [line for line in out.splitlines() if line.startswith("|")]
        assert code == 0
        assert len({line.count("|") for line in rows}) == len({len(line) for line in rows}) == 1
        assert len(rows) == 2 + 10
        golden(out)
        golden(re.sub(" +", " ", rows[2]))

    def test_no_width_breaks_a_line(self, report: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = report("--format", "markdown")[1]
        monkeypatch.setattr(answer, "_screen", lambda: Screen(20))
        assert report("--format", "markdown")[1] == expected


class TestWhatIsNotThere:
    def test_a_broken_file_is_named_and_the_others_are_shown(self, report: Run, root: Path, golden: Golden) -> None:
        path = BaselineStore(root).path("m", ladder.LLAMA[0].spec)
        path.write_text("{")
        code, out, err = report()
        assert code == 1
        assert err.startswith(f"llmperf: {path}: not JSON")
        golden(squeezed(out)[4])
        golden(squeezed(out)[7])

    @pytest.mark.parametrize("how", ["text", "markdown"])
    def test_two_machines_stand_in_one_table(self, report: Run, root: Path, how: str, golden: Golden) -> None:
        keep_rungs(root, ladder.OPT, machine="n")
        keep(root, baseline_at(ladder.LLAMA[2].spec, 5000.0, "n"))
        code, out, err = report("--format", how)
        assert (code, err) == (0, "")
        golden(out)

    def test_of_two_machines_one_can_be_named(self, report: Run, root: Path, golden: Golden) -> None:
        keep_rungs(root, ladder.OPT, machine="n")
        golden(report("--machine", "n")[1])

    def test_two_machines_without_a_rung_have_no_table(self, report: Run, root: Path, tmp_path: Path) -> None:
        for path in tmp_path.iterdir():
            shutil.rmtree(path)
        for machine in ("m", "n"):
            keep(root, baseline_at(TrainSpec(model="llama-tiny"), 1000.0, machine))
        code, out, err = report()
        assert (code, out, "--machine" in err) == (1, "", True)

    @pytest.mark.parametrize("broken", [False, True])
    def test_a_machine_without_a_rung_is_one_line(self, report: Run, root: Path, broken: bool, golden: Golden) -> None:
        other = TrainSpec(model="llama-tiny")
        keep(root, baseline_at(other, 1000.0, machine="cpu"))
        if broken:
            BaselineStore(root).path("cpu", other).write_text("")
        code, out, err = report("--machine", "cpu")
        assert (code, out) == (1, "")
        golden(err.splitlines()[-1])
        golden(err.splitlines()[-1])
        assert len(err.splitlines()) == 1 + broken

    def test_a_rung_of_other_settings_is_none(self, report: Run, root: Path, golden: Golden) -> None:
        keep(root, baseline_at(replace(ladder.LLAMA[1].spec, sequence_length=512), 1.0))
        golden(squeezed(report()[1])[5])

    def test_no_baselines(self, report: Run, tmp_path: Path) -> None:
        code, _, err = report("--perf-baselines", tmp_path / "none")
        assert code == 1
        assert "no baselines here" in err

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--format", "html"], "invalid choice: 'html'"),
        ],
    )
    def test_usage(self, report: Run, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
        with pytest.raises(SystemExit) as ended:
            report(*arguments)
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


def test_markdown_escapes_what_would_be_markup() -> None:
    lines = markdown([Column("a|b", ["x\ny", "<i>"], right=False), Column("n", ["1", "`22`"])])
    assert lines == [
        "| a\\|b |      n |",
        "| ---- | -----: |",
        "| x y  |      1 |",
        "| \\<i> | \\`22\\` |",
    ]
    assert escaped("*b* [l](u) a_b \\") == "\\*b\\* \\[l\\](u) a_b \\\\"
