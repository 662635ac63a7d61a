"""The hook that watches real runs: a run that is started with it, and a ``.pth`` that brings it into a whole Python."""

from __future__ import annotations

import json
import os
import shutil
import sysconfig
import time
from pathlib import Path
from typing import Any, NoReturn

from pytest_llmperf.cli.answer import CaseError
from pytest_llmperf.launch.script import HOOKS, link_package
from pytest_llmperf.run.history import find_revision, project_of
from pytest_llmperf.run.reading import usual_observed
from pytest_llmperf.settings.spec import ScriptSpec

#: Names the folder in which a run that is watched leaves its row.
VARIABLE = "LLMPERF_OBSERVE"

_PTH = "llmperf_hook.pth"
# Inert without the variable. It is no sitecustomize, so that the user's own stays the one that Python runs.
_LINE = (
    "import os; os.environ.get({variable!r}) and "
    "exec(compile(open({file!r}).read(), {file!r}, 'exec'), {{'__name__': 'llmperf_hook', '__file__': {file!r}}})\n"
)


def observe(spec: ScriptSpec, trace_at: int | None, say: Any) -> NoReturn:
    """Become the command: its output, folder, signals and exit code are its own from here on."""
    here, program = Path.cwd(), spec.argv[0]
    if shutil.which(program) is None:
        raise CaseError(f"{program}: no such program on PATH; expected the command as you run it, e.g. python train.py")
    folder = usual_observed() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True)
    link_package(folder)
    found = find_revision(here, here / "baselines")
    revision = found.commit + "+" * bool(found.commit and found.changed)
    order = {"spec": spec.to_dict(), "trace_at": trace_at, "revision": revision, "project": project_of(here)}
    (folder / "request.json").write_text(json.dumps(order), encoding="utf-8")
    say(f"{spec.id} is watched and nothing of it is changed; its row: {folder}, shown by llmperf history {spec.id}")
    paths = os.pathsep.join(filter(None, [str(HOOKS), os.environ.get("PYTHONPATH", "")]))
    os.execvpe(program, spec.argv, {**os.environ, "PYTHONPATH": paths, VARIABLE: str(folder)})  # noqa: S606 - no shell is asked for


def install() -> str:
    """Bring it into every process of this Python, where the variable is set."""
    file = _pth()
    file.write_text(_LINE.format(variable=VARIABLE, file=str(HOOKS / "sitecustomize.py")), encoding="utf-8")
    return f"wrote {file}: without {VARIABLE}=FOLDER it does nothing; llmperf script --remove-hook removes it"


def remove() -> str:
    file = _pth()
    if not file.exists():
        raise CaseError(f"{file}: no hook is installed there")
    file.unlink()
    return f"removed {file}"


def _pth() -> Path:
    return Path(sysconfig.get_path("purelib")) / _PTH
