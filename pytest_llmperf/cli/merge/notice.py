"""Notice of a night: a mail, a line in the file of all nights, and the comment of the job that merges."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_llmperf.report.text import one_line

# A mail program hands over and ends; one that waits for a server that is not there would use up the job's time.
_SECONDS = 120
# Of a line, or of a job's comment: what is longer is in summary.md.
_LONGEST = 400


@dataclass(frozen=True)
class Notice:
    """Who is told of one night; whatever is empty is not told."""

    night: str
    """The name of its folder of results."""
    name: str = ""
    """What mails call it."""
    mail: str = ""
    nights: Path | None = None

    def tell(self, headline: str, page: Sequence[str], unwritten: Sequence[str], troubles: Sequence[str]) -> list[str]:
        """Tell of a night that was merged; who could not be told, and why.

        What could not be written is told first, as nobody will find it there; the night's own ``troubles`` after it.
        """
        is_green = not unwritten and not troubles
        unmailed = self.send("green" if is_green else "RED", [*page, *map(one_line, unwritten)])
        line = "; ".join([headline, *unwritten, *unmailed, *troubles])
        untold = [*unmailed, *self.note(line)]
        if self.nights is not None:
            _comment("; ".join([headline, *unwritten, *untold, *troubles]))
        return untold

    def note(self, line: str) -> list[str]:
        """Add a line to the file of all nights; why it was not added, where it was not."""
        if self.nights is None:
            return []
        try:
            with self.nights.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {self.night}  {_cut(line)}\n")
        except OSError as error:
            return [f"{self.nights}: not written ({error.strerror or error})"]
        return []

    def alarm(self, line: str, *, mailed: bool = True) -> list[str]:
        """Note, and mail, what became of a night without results; who could not be told, and why."""
        unmailed = self.send("RED", [one_line(f"{self.night}: {line}")]) if mailed else []
        return [*unmailed, *self.note("; ".join([line, *unmailed]))]

    def send(self, colour: str, page: Sequence[str]) -> list[str]:
        """Mail it; why it was not mailed, where it was not."""
        if not self.mail:
            return []
        command = ["mail", "-s", f"{self.name}: {colour}", self.mail]
        text = "\n".join([*page, ""]).encode("utf-8", "backslashreplace")
        try:
            subprocess.run(command, input=text, check=True, timeout=_SECONDS)
        except OSError as error:
            return [f"{self.mail}: not mailed (mail: {error.strerror or error})"]
        except subprocess.TimeoutExpired:
            return [f"{self.mail}: not mailed (mail did not end within {_SECONDS} s)"]
        except subprocess.CalledProcessError as error:
            return [f"{self.mail}: not mailed (mail ended with exit code {error.returncode})"]
        return []


def _comment(line: str) -> None:
    """Make ``line`` the comment of the job around this process; a site may not let it, and then its state must do."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return
    command = ["scontrol", "update", f"JobId={job}", f"Comment=llmperf: {_cut(line)}"]
    try:
        subprocess.run(command, check=False, timeout=_SECONDS, capture_output=True)
    except (OSError, subprocess.TimeoutExpired):
        return


def _cut(line: str) -> str:
    line = one_line(line)
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."
