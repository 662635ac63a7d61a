"""The file that keeps a device's calibration from launch to launch of a day."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_llmperf.records.calibration import Calibration
from pytest_llmperf.support.files import write_text
from pytest_llmperf.support.json_fields import typed


@dataclass(frozen=True)
class Kept:
    """What a file holds."""

    calibration: Calibration
    boot: str
    """Under which start of its host it was made."""

    def serves(self, day: str, boot: str, power_limit_watts: float, versions: Mapping[str, str]) -> bool:
        """Whether it is as good as one made on this UTC ``day``, under this start of the host, limit and versions."""
        made = self.calibration
        same_time = made.made_at[:10] == day and self.boot == boot
        return same_time and made.power_limit_watts == power_limit_watts and made.versions == dict(versions)


def read(path: Path) -> Kept | None:
    """What ``path`` holds; ``None`` where that is nothing that can be used: it can be made anew."""
    try:
        document = typed(json.loads(path.read_text(encoding="utf-8")), {"boot": "str"}, "a kept calibration")
        return Kept(Calibration.from_dict(document["calibration"]), document["boot"])
    except (OSError, ValueError, LookupError, RecursionError):
        return None


def write(path: Path, calibration: Calibration, boot: str) -> None:
    """Keep it; where nothing can be written the next launch makes its own."""
    text = json.dumps({"boot": boot, "calibration": calibration.to_dict()}, indent=1, sort_keys=True) + "\n"
    with suppress(OSError):
        write_text(path, text, lasts=False)
