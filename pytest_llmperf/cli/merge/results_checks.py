"""What is read of a ``--perf-json`` file is what it should be, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pytest_llmperf.records.result import VERDICTS
from pytest_llmperf.run.coverage import SAID
from pytest_llmperf.run.findings import Elsewhere

_TEXTS = ("id", "digest", "nodeid", "verdict")
_FIGURES = ("value", "baseline", "limit", "change", "detectable")

_SKIPPED = {"id": str, "reason": str}
_PLANNED = {"id": str, "nodeid": str, "width": int}
_OF_A_TEST = {"nodeid": str, "width": int}
_TEST = {"nodeid": str, "outcome": str}
_ELSEWHERE = get_args(Elsewhere)
_SUITE = {"rootdir": str, "baselines": str, "digests": list, "coverage": dict}

# A record has about ten levels; where Python cannot write any deeper depends on who calls.
_DEEPEST = 100


def check(values: object) -> None:
    """Refuse what no ``--perf-json`` has.

    Raises:
        ValueError: what is not as it should be, in one line.
    """
    if not isinstance(values, dict) or not _is_whole(values.get("schema")) or values["schema"] != 1:
        raise ValueError("expected schema 1")
    if _is_deep(values):
        raise ValueError("nested too deeply")
    if not isinstance(values.get("results"), list) or not isinstance(values.get("machine", {}), dict):
        raise ValueError("expected results in a list, and the machine by name")
    if not isinstance(values.get("unfinished", ""), str) or not _is_whole(values.get("exit_code", 0)):
        raise ValueError("expected exit_code as a whole number, and unfinished as text")
    for result in values["results"]:
        _check_result(result)
    tests = values.get("tests", [])
    if not isinstance(tests, list) or not all(_has(test, _TEST) for test in tests):
        raise ValueError(f"expected tests in a list, each with {', '.join(_TEST)}")
    _check_whole_run(values)
    _check_suite(values)
    for name, fields in (("revision", {"commit": str, "changed": int}), ("slurm", {"job": str, "starts": int})):
        if name in values and not _has(values[name], fields):
            raise ValueError(f"expected {name} with {', '.join(fields)}")


def _check_result(result: object) -> None:
    if not isinstance(result, dict) or not all(isinstance(result.get(name), str) for name in _TEXTS):
        raise ValueError(f"a result whose {', '.join(_TEXTS)} are not all there as text")
    if result["verdict"] not in VERDICTS:
        raise ValueError(f"{result['id']}: verdict {result['verdict']!r}, expected one of {', '.join(VERDICTS)}")
    launches = result.get("launches", [])
    if not isinstance(launches, list) or not all(isinstance(launch, dict) for launch in launches):
        raise ValueError(f"{result['id']}: expected its launches in a list")
    if not isinstance(result.get("reason", ""), str):
        raise ValueError(f"{result['id']}: expected the reason as text")
    for name in ("changed", "differences"):
        lines = result.get(name, [])
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise ValueError(f"{result['id']}: expected its {name} in a list of lines")
    metrics = result.get("metrics")
    if not isinstance(metrics, dict) or not all(isinstance(metric, dict) for metric in metrics.values()):
        raise ValueError(f"{result['id']} has no metrics by name")
    for name, metric in metrics.items():
        if not all(_is_figure(metric.get(figure)) for figure in _FIGURES):
            raise ValueError(f"{result['id']}: {name} has a figure that is no number")


def _check_whole_run(values: dict[str, Any]) -> None:
    """What a run says of all its cases together, where it does."""
    common = values.get("all_cases", {"verdict": "pass"})
    if not isinstance(common, dict) or common.get("verdict") not in VERDICTS:
        raise ValueError(f"expected all_cases with a verdict, one of {', '.join(VERDICTS)}")
    if not isinstance(common.get("told", ""), str) or not isinstance(values.get("unjudged", ""), str):
        raise ValueError("expected what is told of all cases, and why they are unjudged, as text")


def _check_suite(values: dict[str, Any]) -> None:
    """What a run says of its tests, where it does."""
    for name, fields in (("skipped", _SKIPPED), ("planned", _PLANNED)):
        cases = values.get(name, [])
        if not isinstance(cases, list) or not all(_has(case, fields) for case in cases):
            raise ValueError(f"expected {name} cases in a list, each with {', '.join(fields)}")
    for case in values.get("skipped", []):
        if "nodeid" in case and not (_has(case, _OF_A_TEST) and case.get("elsewhere", "") in _ELSEWHERE):
            raise ValueError(f"{case['id']}: expected a skipped case with {', '.join(_OF_A_TEST)}")
    if "suite" not in values:
        return
    suite = values["suite"]
    if not _has(suite, _SUITE) or not all(isinstance(digest, str) for digest in suite["digests"]):
        raise ValueError(f"expected a suite with {', '.join(_SUITE)}")
    if not isinstance(suite.get("strict"), bool) or not (
        suite.get("perf_width") is None or _is_whole(suite["perf_width"])
    ):
        raise ValueError("expected the suite's width as a whole number, and strict as yes or no")
    coverage = suite["coverage"]
    names = [coverage.get(name) for name in ("nodes", "parts", "gaps")]
    if not all(isinstance(each, list) and all(isinstance(name, str) for name in each) for each in names):
        raise ValueError("expected the suite's coverage as lists of names")
    said = coverage.get("said")
    if not isinstance(said, dict) or not all(word in SAID for word in said.values()):
        raise ValueError(f"expected what each test said, one of {', '.join(SAID)}")


def _has(value: object, fields: Mapping[str, type]) -> bool:
    if not isinstance(value, dict):
        return False
    return all(
        isinstance(value.get(name), type_) and not isinstance(value[name], bool) for name, type_ in fields.items()
    )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_figure(value: object) -> bool:
    return value is None or isinstance(value, float) or _is_whole(value)


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        ]
        if not level:
            return False
    return True
