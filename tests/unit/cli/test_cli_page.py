"""``llmperf report RESULTS… --html FILE``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_llmperf.cli import main
from pytest_llmperf.report import page as html_page
from tests.golden import Golden
from tests.pages import drawn_once
from tests.runs import LADDER, ladder_run, stored_at, written
from tests.shelf import Run, keep, llmperf_on


@pytest.fixture
def llmperf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    stored = [stored_at(rung.spec, rate) for rung, rate in LADDER.values()]
    return llmperf_on(keep(tmp_path / "baselines", *stored), capsys)


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what a page takes is installed."""
    for name in ("jinja2", "vl_convert"):
        pytest.importorskip(name, reason="a page takes the extra `page`")
    monkeypatch.setattr(html_page, "svgs", drawn_once)


@pytest.mark.usefixtures("complete")
def test_results_become_a_page_beside_the_baselines(llmperf: Run, tmp_path: Path) -> None:
    results, page = written(tmp_path / "night.json", ladder_run()), tmp_path / "night.html"
    assert llmperf("report", results, "--html", page) == (0, f"{page}: 11 cases of 1 run\n", "")
    text = page.read_text(encoding="utf-8")
    assert '<h3 class="regressed">1 regressed</h3>' in text
    assert text.count('<tbody class="case"') == 11


@pytest.mark.usefixtures("complete")
def test_a_file_that_cannot_be_read_is_a_line_here_and_on_the_page(llmperf: Run, tmp_path: Path) -> None:
    good, cut, page = written(tmp_path / "a.json", ladder_run()), tmp_path / "cut.json", tmp_path / "p.html"
    cut.write_text(good.read_text(encoding="utf-8")[:1000], encoding="utf-8")
    newer = written(tmp_path / "newer.json", {"schema": 7, "results": []})
    code, output, errors = llmperf("report", good, cut, newer, tmp_path / "none.json", "--html", page)
    assert (code, output) == (1, f"{page}: 11 cases of 1 run\n")
    told = errors.splitlines()
    assert [line.partition(": ")[0] for line in told] == ["llmperf"] * 3
    for line, why in zip(told, ("not JSON, perhaps truncated", "schema 7 is newer", "No such file"), strict=True):
        assert why in line
    assert "schema 7 is newer" in page.read_text(encoding="utf-8")


@pytest.mark.usefixtures("complete")
def test_a_history_that_cannot_be_read_is_a_line_here_and_on_the_page(
    llmperf: Run, tmp_path: Path, golden: Golden
) -> None:
    results, page, store = written(tmp_path / "a.json", ladder_run()), tmp_path / "p.html", tmp_path / "store.sqlite"
    store.write_text("no store", encoding="utf-8")
    code, output, errors = llmperf("report", results, "--html", page, "--perf-history", store)
    assert (code, output) == (1, f"{page}: 11 cases of 1 run\n")
    (told,) = errors.splitlines()
    golden(told)
    assert store.name in page.read_text(encoding="utf-8")


@pytest.mark.usefixtures("complete")
def test_old_files_with_nan_are_read(llmperf: Run, tmp_path: Path) -> None:
    results = tmp_path / "old.json"
    results.write_text(json.dumps(ladder_run()).replace("50.0", "NaN"), encoding="utf-8")
    code, _, errors = llmperf("report", results, "--html", tmp_path / "p.html")
    assert (code, errors) == (0, "")


@pytest.mark.usefixtures("complete")
def test_nothing_to_show_or_nowhere_to_write_is_an_error_and_no_file(
    llmperf: Run, tmp_path: Path, golden: Golden
) -> None:
    page = tmp_path / "p.html"
    code, output, errors = llmperf("report", tmp_path / "none.json", "--html", page)
    assert (code, output, page.exists()) == (1, "", False)
    golden(errors.splitlines()[-1])
    results = written(tmp_path / "a.json", ladder_run([]))
    code, _, errors = llmperf("report", results, "--html", "/proc/p.html")
    assert code == 1
    golden(errors)


@pytest.mark.usefixtures("complete")
def test_files_of_one_name_are_told_apart(llmperf: Run, tmp_path: Path) -> None:
    files = []
    for folder in ("monday", "tuesday"):
        (tmp_path / folder).mkdir()
        files.append(written(tmp_path / folder / "night.json", ladder_run()))
    page = tmp_path / "p.html"
    assert llmperf("report", *files, "--html", page)[1] == f"{page}: 22 cases of 2 runs\n"
    assert "night.json (2)" in page.read_text(encoding="utf-8")


def test_without_a_word_it_is_what_baselines_hold(llmperf: Run) -> None:
    assert llmperf("report") == llmperf("report", "--tables")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--html", "p.html"], "--html needs RESULTS: the --perf-json files of the runs"),
        (["a.json", "--tables"], "a.json: results of runs go on a page, which --html FILE names"),
        (["a.json", "--html", "p.html", "--machine", "m"], "--machine says nothing to --html"),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_what_is_not_installed_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(html_page, "find_spec", lambda _: None)
    assert main(["report", str(tmp_path / "a.json"), "--html", "p.html"]) == 1
    told = "a page takes jinja2 and vl-convert-python, which are not installed; pip install 'pytest-llmperf[page]'"
    assert capsys.readouterr().err == f"llmperf: --html p.html: {told}\n"
