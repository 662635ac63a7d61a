"""The results document: its JSON schema, and the one answer that every reader gives to a file that it cannot read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_llmperf.cli import main
from pytest_llmperf.records.result import Reference
from pytest_llmperf.records.results_document import ResultsDocument, ResultsError, ResultsFile, document_of, read_values
from pytest_llmperf.report.results_json import document, write_json
from tests.runs import LADDER, ladder_run, result_of, written
from tests.unit.report.test_report_failure import REGRESSED
from tools.results_schema import PATH, text


def plain(values: Any) -> Any:
    return json.loads(json.dumps(values))


def test_the_schema_that_ships_is_made_of_the_types() -> None:
    assert PATH.read_text(encoding="utf-8") == text(), "python -m tools.results_schema writes it again"


_FULL = replace(
    result_of(*LADDER["llama-3.2-1b-bf16-sdpa-liger-mbs37-gpus1"]),
    reference=Reference(source="book", tokens_per_second_per_gpu=None),
    notes=("n",),
    updated="u",
    shares="t",
    shared_launches=1,
)


_DIVERGED = replace(REGRESSED, launches=(replace(REGRESSED.launches[0], losses=(math.nan, 1.0)),))


@pytest.mark.parametrize(
    "values",
    [
        ladder_run(),
        document({"kind": "h200"}, [_FULL, REGRESSED]),
        document({}, [_DIVERGED]),
    ],
    ids=["a ladder", "with all that a case may have", "a loss that is no number"],
)
def test_documents_are_valid_by_the_schema(values: dict[str, Any]) -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator(json.loads(PATH.read_text(encoding="utf-8")))
    assert [error.json_path for error in validator.iter_errors(plain(values))] == []


def test_a_loss_curve_of_an_older_version_passes(tmp_path: Path) -> None:
    values = plain(ladder_run())
    values["results"][0]["loss_curve"] = {"verdict": "same", "reason": "r", "seeds": [1], "stored_seeds": 5}
    path = tmp_path / "old.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    assert ResultsFile.read(path).document == document_of(plain(ladder_run()))
    pytest.importorskip("jinja2")
    assert main(["report", str(path), "--html", str(tmp_path / "old.html")]) == 0


@pytest.mark.parametrize(
    "change",
    [{"results": 3}, {"schema": "1"}, {"exit_code": "0"}, {"machine": {"gpus": [3]}}, {"suite": {}}, {"skipped": [{}]}],
)
def test_what_is_refused_is_not_valid_by_it_either(change: dict[str, Any], tmp_path: Path) -> None:
    values = {**plain(ladder_run()), **change}
    with pytest.raises(ResultsError):
        ResultsFile.read(written(tmp_path / "a.json", values))
    validator = pytest.importorskip("jsonschema").Draft202012Validator(json.loads(PATH.read_text(encoding="utf-8")))
    assert not validator.is_valid(values)


def test_both_readings_of_a_whole_document_are_the_same_and_leave_nothing_out(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, ladder_run())
    read = ResultsFile.read(path)
    assert read.document == document_of(read_values(path))
    assert [each.id for each in read.document.results] == [each["id"] for each in read.values["results"]]


def test_the_lenient_reading_leaves_out_what_does_not_fit() -> None:
    values = {"results": [{"id": 3, "metrics": {"a": {"value": "x", "unit": "s"}, "b": 3}}, 7], "exit_code": "1"}
    (result,) = document_of(values).results
    assert (result.id, result.figure("a").value, result.figure("a").unit) == ("", None, "s")
    assert document_of([]) == ResultsDocument(results=())


_READERS: dict[str, Callable[[str], list[str]]] = {
    "history": lambda path: ["history", "--from", path],
    "merge": lambda path: ["merge", path],
    "report, a page": lambda path: ["report", path, "--html", f"{path}.html"],
}
_NEWER = "schema 2 is newer than this version understands (1); upgrade pytest-llmperf"


@pytest.mark.parametrize("reader", _READERS)
@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ('{"schema": 2, "results": []}', _NEWER),
        ('{"schema": 2, "results": {"by": "name"}}', _NEWER),
        (
            '{"schema": 1, "results": 7}',
            "its results are no list, or nested too deeply; expected a file of --perf-json",
        ),
        ('{"schema": 1, "results": [', "not JSON, perhaps truncated (Expecting value: line 1 column 27 (char 26)); "),
    ],
    ids=["newer", "newer, of another shape", "no list", "truncated"],
)
def test_every_reader_gives_one_answer_to_a_file_that_it_cannot_read(
    reader: str, content: str, answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2")
    path = tmp_path / "run.json"
    path.write_text(content)
    assert main(_READERS[reader](str(path))) != 0
    told = capsys.readouterr()
    assert f"{path}: {answer}" in f"{told.out}\n{told.err}"
