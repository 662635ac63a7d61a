"""What a launch of a user's own command does beside training, said before and after it."""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import cast

from pytest_llmperf.launch.request import LaunchRequest
from pytest_llmperf.settings.script_spec import ScriptSpec
from pytest_llmperf.support.redaction import redacted, without_secrets

#: Trackers keep what they would send. What the shell says of these does not count: only ``env=`` lets a launch send.
QUIET = {
    "WANDB_MODE": "offline",
    "COMET_START_ONLINE": "0",
    "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "offline",
}
#: Without these MLflow and Trackio write into the folder where they run.
UNSET = ("MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID")

#: The folder that brings hooks into the processes of a command.
HOOKS = Path(__file__).parents[1] / "worker" / "script" / "path"
_PATHS = ("PATH", "PYTHONPATH")
_MOST_ENTRIES, _MOST_SHOWN = 4000, 3


@contextmanager
def announced(request: LaunchRequest, say: Callable[[str], None], said: set[str]) -> Iterator[None]:
    """Say once what is set for a script and where it runs, and after it which of the user's files it wrote."""
    spec = request.spec
    if not isinstance(spec, ScriptSpec):
        yield
        return
    here, began = spec.folder(request.tree or request.root), time.time()
    place = f"in {here} itself" if spec.workdir == "own" else f"in a folder of its own that shows the files of {here}"
    variables = redacted(set_for(request, os.environ))
    names = " ".join(shlex.quote(f"{name}={value}") for name, value in variables.items() if name not in _PATHS)
    dropped = "".join(f", without {name}" for name in UNSET if name in os.environ)
    text = f"{without_secrets(shlex.join(spec.argv))} runs {place}, with {names}{dropped}"
    ends = "nothing of it runs after its measured steps" if spec.end == "park" else "it runs to its own end"
    _say_once(f"{spec.id}: {text}; {ends}", say, said)
    yield
    written = list(islice(_written(here, began), _MOST_SHOWN + 1))
    if written:
        told = f"{', '.join(written[:_MOST_SHOWN])}{' and more' if len(written) > _MOST_SHOWN else ''}"
        line = f"{spec.id}: while it ran, files of {here} were written: {told}; give the script another output folder"
        _say_once(line, say, said)


def _say_once(line: str, say: Callable[[str], None], said: set[str]) -> None:
    if line not in said:
        said.add(line)
        say(line)


def set_for(request: LaunchRequest, inherited: Mapping[str, str]) -> dict[str, str]:
    """What a launch of a script sets: it sends nothing away, and finds the hooks and the Python that is asked for.

    The latter's programs stand alone in ``PATH``, before those of wherever it starts.
    """
    own: dict[str, str] = {**request.variables, **cast("ScriptSpec", request.spec).env}
    is_ours = request.python == sys.executable
    # A package of the project that is installed here as editable is another revision's there.
    trees = [str(request.tree), str(request.tree / "src")] if request.tree else []
    paths = filter(None, [str(HOOKS), *trees, own.get("PYTHONPATH", inherited.get("PYTHONPATH"))])
    return {
        **QUIET,
        "HF_HUB_OFFLINE": inherited.get("HF_HUB_OFFLINE", "1"),
        **own,
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": sysconfig.get_path("scripts") if is_ours else str(Path(request.python).parent),
    }


def _written(here: Path, since: float) -> Iterator[str]:
    """Files below ``here`` that changed ``since``, of the first few thousand; hidden folders are tools'."""
    entries = 0
    for folder, folders, files in os.walk(here):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        entries += len(files) + len(folders)
        if entries > _MOST_ENTRIES:
            return
        for path in (Path(folder, name) for name in files):
            with suppress(OSError):
                if path.stat().st_mtime >= since:
                    yield str(path.relative_to(here))
