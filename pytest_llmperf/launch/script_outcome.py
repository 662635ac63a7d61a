"""Why a user's own command left no record, in one line: what was seen of its training, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from pytest_llmperf.launch.process import Ended, signal_name
from pytest_llmperf.records.failure import Failure, Progress
from pytest_llmperf.records.memory_shortage import said

_NO_HOOK = (
    "no Python process of it loaded our hook (python -I, -E or -S, PYTHONPATH set anew, or a sitecustomize before ours)"
)
_OFFLINE = ("OfflineModeIsEnabled", "offline mode", "HF_HUB_OFFLINE")
_ENDED = ("error", "killed", "never-started")
_LAST = 60


def explained(failure: Failure, ended: Ended, progress: Progress, lines: Sequence[str]) -> Failure:
    """``failure`` in the words of a script, whose log has these ``lines``."""
    folder, message, last = Path(failure.folder), failure.message, lines[-_LAST:]
    name = signal_name(ended.returncode)
    how = f"the command{ended.where} " + (f"was ended by {name}" if name else f"ended with {ended.returncode}")
    is_untold = failure.rank is None and failure.kind in _ENDED
    short = next((line.strip() for line in (*failure.tail, *last) if said(line) == "plainly"), "")
    if short and failure.kind in _ENDED:
        return replace(failure, kind="oom", message=f"{how if is_untold else message}: {short}")
    if failure.kind == "timeout" and not progress.step:
        within = f"{ended.seconds:.0f} s"
        message = f"no optimizer step within {within}: {seen(folder)};{message.removeprefix(f'no end after {within},')}"
        if not any(folder.glob("rank-*.pid")):  # what hangs has no rank yet
            message = message.replace(" ranks ", " processes ").replace(" rank ", " process ")
    elif is_untold:
        said_last = _said_last(lines) if ended.returncode else ""
        why = f"its last line: {said_last}" if said_last else ""
        if progress.step:
            how += f" after step {progress.step} of {progress.steps}"
            why = why or ("somebody killed it" if name else "too few steps, os._exit, or a training in the background")
        else:
            how += " before its first optimizer step"
            is_python = any(line.startswith("Traceback") for line in last)
            is_unhooked = is_python and not any(folder.glob("seen-*"))
            why += f"; {_NO_HOOK}: llmperf script --install-hook reaches these" if is_unhooked else ""
        message = f"{how}: {why or seen(folder)}"
    if any(word in line for line in last for word in _OFFLINE):
        message += "; launches are offline: env={'HF_HUB_OFFLINE': '0'} lets the script download"
    return replace(failure, message=message)


def _said_last(lines: Sequence[str]) -> str:
    """The last line with words, before torchrun's report."""
    own = takewhile(lambda line: "torch/distributed/elastic" not in line, lines)
    return next((line.strip() for line in reversed([*own]) if any(map(str.isalpha, line))), "")


def seen(folder: Path) -> str:
    """What its processes have left of a training that has not made a step."""
    found = [path.read_text(encoding="ascii") for path in folder.glob("seen-*")]
    if any(folder.glob("rank-*.pid")):
        return "a backward pass was seen, and no call of a torch optimizer (an update by hand?)"
    if "torch" in found:
        return "torch was imported, and no backward pass seen (inference, or still loading?)"
    return "no process of it imported torch" if found else _NO_HOOK
