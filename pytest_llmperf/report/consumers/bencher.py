"""Bencher Metric Format: a benchmark for each case, a measure for each metric."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator

from pytest_llmperf.report.consumers.exported_run import ExportedCase, ExportedRun

# Bencher's own limits: its pages say characters and its parser counts bytes of UTF-8, and one name that is longer
# costs the whole file.
_LONGEST_BENCHMARK, _LONGEST_MEASURE = 1024, 64
_HASH_DIGITS = 8
_NO_SLUG = re.compile(r"[^a-z0-9]+")


def bencher(run: ExportedRun) -> Iterator[str]:
    """One JSON object, in ASCII; ``{}`` where no case has a figure that can be trusted.

    Bencher's word for a machine is a testbed, which a report has one of: cases of several are told apart by name.
    """
    values: dict[str, dict[str, dict[str, float]]] = {}
    for case in run.cases:
        measures = {_slug(figure.metric): {"value": value} for figure, value in case.trusted}
        if measures:
            values.setdefault(_fitting(case_name(case, run), _LONGEST_BENCHMARK), measures)
    yield from json.dumps(values, indent=1, allow_nan=False).splitlines()


def case_name(case: ExportedCase, run: ExportedRun) -> str:
    """Its name, with its machine where ``run`` is of several."""
    return f"{case.name} ({case.machine or 'unknown machine'})" if len(run.machines) > 1 else case.name


def _slug(metric: str) -> str:
    return _fitting(_NO_SLUG.sub("-", metric.lower()).strip("-") or "unnamed", _LONGEST_MEASURE)


def _fitting(name: str, most: int) -> str:
    """``name`` in ``most`` bytes, no character in half; what is cut stays told apart."""
    encoded = name.encode("utf-8", "backslashreplace")
    if len(encoded) <= most:
        return name
    digits = hashlib.sha256(encoded).hexdigest()[:_HASH_DIGITS]
    kept = encoded[: most - _HASH_DIGITS - 1].decode("utf-8", "ignore")
    return f"{kept.rstrip('-')}-{digits}"  # two hyphens in a row would be no slug, and the name taken for a title
