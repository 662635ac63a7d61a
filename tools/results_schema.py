"""Write the JSON schema of ``--perf-json`` again, of the types in ``records/results_document.py``.

``python -m tools.results_schema``
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pytest_llmperf.records import results_document
from pytest_llmperf.records.launch import Launch
from pytest_llmperf.records.results_document import CommonChange, ResultsDocument
from pytest_llmperf.records.trace import TraceForm

PATH = Path(results_document.__file__).with_name("results.schema.json")


def text() -> str:
    """What the file holds."""
    return json.dumps(_schema(), indent=1) + "\n"


def _schema() -> dict[str, Any]:
    """Of a document, with the types that it is made of."""
    kinds = [ResultsDocument, Launch, CommonChange, TraceForm]
    (document, *_), types = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    del types["TraceRow"]
    none = {"type": "object", "properties": {"none": {"type": "string"}}, "required": ["none"]}
    types["Trace"] = {"title": "Trace", "anyOf": [{"$ref": "#/$defs/TraceForm"}, none]}
    for name in ("Launch", "Learning", "ReplayedUpdate"):
        types[name] = _with_nulls(types[name])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document, "$defs": types}


def _with_nulls(values: Any) -> Any:
    """A schema in which a number may be null, as one is that strict JSON has no word for."""
    if isinstance(values, Mapping):
        found = {name: _with_nulls(value) for name, value in values.items()}
        return {**found, "type": ["number", "null"]} if values.get("type") == "number" else found
    return list(map(_with_nulls, values)) if isinstance(values, list) else values


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
