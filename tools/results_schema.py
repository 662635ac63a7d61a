"""Write the JSON schema of ``--perf-json`` again, of the types in ``records/results_document.py``.

``python -m tools.results_schema``
"""

from __future__ import annotations

import json
from pathlib import Path

from pytest_llmperf.records import results_document

PATH = Path(results_document.__file__).with_name("results.schema.json")


def text() -> str:
    """What the file holds."""
    return json.dumps(results_document.json_schema(), indent=1) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
