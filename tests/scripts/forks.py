"""Runs many scripts under the hooks, each in a fork of one process that has imported torch: ``python forks.py FILE``.

FILE lists them in JSON, each with the folder of its launch, its words, and what is to be imported first. Each ends when
its ranks have left their shares, or by itself; how is left in ``ended.json``.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_SECONDS = 300.0
# What hooks need, now or for their evidence.
_SETTINGS = (f"pytest_llmperf.worker.settings.{name}" for name in "compilation liger parallelism".split())
_OURS = ("pytest_llmperf.worker.script.torch_hooks", *_SETTINGS)


def run(script: dict[str, Any]) -> int:
    """In the fork: as Python itself runs a script."""
    folder, words = Path(script["folder"]), script["words"]
    log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    os.environ.update(script["environment"], OWN_CLOCK=str(folder / "clock"), LLMPERF_SCRIPT=str(folder))
    sys.argv[:] = words
    sys.path.insert(0, str(Path(words[0]).parent))
    importlib.import_module("pytest_llmperf.worker.script.torch_hooks").watch(str(folder))
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - whatever a script raises
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def forked(script: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    os.setsid()
    code = 99
    try:
        code = run(script)
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(script: dict[str, Any], pid: int) -> str | int:
    """Wait until it is over, as a launcher does."""
    folder, deadline = Path(script["folder"]), time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if any(folder.glob("failure-*.json")):
            return "failed"
        if script["parks"] and len(list(folder.glob("share-*.json"))) == script["ranks"]:
            return "parked"
        time.sleep(0.05)
    return "timeout"


def main() -> None:
    scripts = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for name in dict.fromkeys(name for script in scripts for name in (*script["imports"], *_OURS)):
        importlib.import_module(name)
    # What each of them would find out for itself: which packages there are, and which of their files are as installed.
    importlib.import_module("pytest_llmperf.worker.imports").patched_files()
    gc.collect()
    gc.freeze()
    for script in scripts:
        pid = forked(script)
        how = ended(script, pid)
        if isinstance(how, str):
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        (Path(script["folder"]) / "ended.json").write_text(json.dumps(how), encoding="utf-8")


if __name__ == "__main__":
    main()
