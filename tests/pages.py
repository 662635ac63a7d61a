"""Pages of runs that never were, as HTML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from unittest import mock

from pytest_llmperf.judge.case_histories import CaseHistory
from pytest_llmperf.report import page
from pytest_llmperf.report.results_json import RunDocument
from pytest_llmperf.run.page_charts import Baselines
from pytest_llmperf.run.run_page import page_of
from tests.runs import ladder_run

#: What would be a picture, two scripts, a template and the end of a style sheet, if it were markup.
EVIL = '<img src=x onerror="throw 1"><script>throw 2</script>&amp;"\'{{ 7 * 7 }}</style></details>'


_draw = page.svgs
_pictures: dict[str, str] = {}


def drawn_once(specifications: Sequence[object]) -> list[str]:
    """What ``svgs`` draws, each picture once: a page takes half a second for its own, and most pages show the same."""
    asked = [json.dumps(one) for one in specifications]
    new = [one for one in dict.fromkeys(asked) if one not in _pictures]
    _pictures.update(zip(new, _draw([json.loads(one) for one in new]), strict=False))
    return [_pictures[one] for one in asked] if _pictures.keys() >= set(asked) else []


def made(values: Any, stored: Baselines | None = None, histories: Sequence[CaseHistory] = ()) -> str:
    told = page_of([RunDocument(values)], stored or {}, histories=histories)
    with mock.patch.object(page, "svgs", drawn_once):
        return page.html(told)


def evil_run() -> Any:
    """A document of which every text is an attack."""

    def attacked(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: value[name] if name == "verdict" else attacked(value[name]) for name in value}
        if isinstance(value, list):
            return [attacked(each) for each in value]
        return EVIL if isinstance(value, str) else value

    values = attacked(json.loads(json.dumps(ladder_run())))
    values["results"][0] |= {"verdict": EVIL, "id": EVIL + "\ud800\x00\x1b[31m"}
    values["results"][1]["notes"] = [EVIL]
    return values | {"skipped": [{"id": EVIL, "reason": EVIL}], "unfinished": EVIL}


def many(number: int) -> Any:
    """So many cases: eleven judged ones, each again and again under another name."""
    values = json.loads(json.dumps(ladder_run()))
    results = values["results"]
    values["results"] = [
        {
            **results[index % len(results)],
            "id": results[index % len(results)]["id"].replace("-gpus", f"-case{index}-gpus"),
        }
        for index in range(number)
    ]
    return values
