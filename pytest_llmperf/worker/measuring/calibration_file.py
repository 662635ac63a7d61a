"""The file that keeps a device's calibration from launch to launch of a day."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_llmperf.records.calibration import UNKEPT, Calibration
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


def write(path: Path, calibration: Calibration, boot: str, of_run: Path | None = None) -> None:
    """Keep it at ``path``; where that cannot be written at ``of_run``, for this run, with the reason beside it."""
    text = json.dumps({"boot": boot, "calibration": calibration.to_dict()}, indent=1, sort_keys=True) + "\n"
    try:
        write_text(path, text, lasts=False)
    except OSError as error:
        if of_run is not None:
            # Where not even this can be written the launch's own record cannot be, which says so itself.
            with suppress(OSError):
                write_text(of_run, text, lasts=False)
                write_text(of_run.with_name(UNKEPT), f"{path.parent}: {error.strerror or error}\n", lasts=False)
