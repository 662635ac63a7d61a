"""The JSON of ``--perf-json`` files, also of old and broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_lenient(path: Path) -> Any:
    """The values in ``path``; what is no finite number, as old files have it, is absent.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, in a line.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON, perhaps truncated ({error})") from None
