"""Vega-Lite's specifications as SVG, by the process that draws the page's charts too."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_llmperf.report.page import vega_drawing


def drawn(specifications: Sequence[Mapping[str, Any]]) -> list[str]:
    """SVG of each."""
    command = [sys.executable, str(Path(vega_drawing.__file__))]
    done = subprocess.run(command, input=json.dumps(specifications), capture_output=True, text=True, check=True)
    return [str(picture) for picture in json.loads(done.stdout)]
