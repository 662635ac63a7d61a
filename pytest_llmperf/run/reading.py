"""Settings, read once of what a front-end was given; what cannot be used ends the run here, in one line."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_llmperf.run.options import (
    ALONE,
    CHECK,
    MAX_LAUNCHES,
    PYTEST,
    SLURM_INI,
    Option,
    OptionError,
    Settings,
    UsageError,
    table,
    why_no_folder,
)
from pytest_llmperf.support.files import refused_at, state_folder

if TYPE_CHECKING:
    from pytest_llmperf.launch.site import SlurmOptions
    from pytest_llmperf.run.findings import Width

# A Python on a network's file system, at its first start.
_ASK_SECONDS = 120.0

# In the place of a file of history.
_OFF = "off"


def read_settings(
    front: str, said: Namespace, *, here: Path, rootdir: Path, ini: Callable[[str], Any] = lambda _: "", **fixed: Any
) -> Settings:
    """Read what ``front`` was asked for, on the command line before its ini file; ``UsageError``: it cannot be used.
    Relative paths are ``here``, those of an ini file under ``rootdir``; ``fixed`` is what nobody can ask otherwise."""
    _refuse_unknown_fault()
    values: dict[str, Any] = {}
    for name, option in table(Settings):
        value, where = _said(option, said, ini)
        if option.path:
            value = _path(option, where, value, here if where == option.flag else rootdir, front)
        elif value is None:
            value = option.at(front, "default")
        values[name] = value
    _refuse_what_does_not_go_together(front, said, values)
    _refuse_what_cannot_be(front, said, values)
    most, least = getattr(said, "perf_max_launches", None), values["launches"]
    values |= {
        "reason": values["reason"].strip(),
        "baselines": values["baselines"] or rootdir / "baselines",
        "max_launches": max(least, MAX_LAUNCHES) if most is None else most,
        # Nothing is launched, so an allocation is as good as any other place.
        "launcher": "local" if values["static"] else values["launcher"],
        "slurm": _slurm(ini),
        "width": _width(values["width_gpus"], values["plan"]),
    }
    folder = values["baselines"]
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    # Found out now, and not by each case; but that of a machine in it may be ours.
    is_shared = any(each.is_dir() and os.access(each, os.W_OK) for each in folder.glob("*"))
    if values["update"] and not is_shared and (why := refused_at(there / folder.name)):
        raise UsageError(f"--perf-baselines {folder}: cannot be written ({why}); name a folder where you may write")
    if values["against"]:
        from pytest_llmperf.run.history import has_commit

        if not values["against"].startswith("git:"):
            if (found := shutil.which(values["against"])) is None:
                why = "no such interpreter; expected e.g. old-venv/bin/python"
                raise UsageError(f"--perf-against {values['against']}: {why}")
            values["against"] = str(Path(found).absolute())
            values["against_itself"] = _environment(values["against"]) == _environment(sys.executable)
        elif not has_commit(rootdir, values["against"].removeprefix("git:")):
            raise UsageError(
                f"--perf-against {values['against']}: no such revision, and no git repository that has it, at "
                f"{rootdir}; expected e.g. git:HEAD~1, or an interpreter"
            )
    return replace(Settings(**values), **fixed)


def without_effect(said: Namespace) -> str:
    """A line about what was said of launches, where there are none; empty: nothing was."""
    names = [one.flag for _, one in table(Settings) if one.launches and getattr(said, one.dest, None) is not None]
    return f"{', '.join(names)}: without effect, since nothing is launched" if names else ""


def usual_history() -> Path:
    """Where runs keep their history: one file for all projects of a user, since a case is what its settings say."""
    return state_folder() / "history.sqlite"


def usual_observed() -> Path:
    """Where real runs that are watched leave their rows, a folder each."""
    return state_folder() / "observed"


def _said(option: Option, said: Namespace, ini: Callable[[str], Any]) -> tuple[Any, str]:
    """The value, ``None`` where nobody said one, and who said it."""
    value = getattr(said, option.dest, None) if option.flag else None
    if value is not None:
        is_text = isinstance(value, str) and (option.keeps_text or option.means)
        value = option.typed(value) if is_text else value
        return value, option.flag
    word = ini(option.ini) if option.ini else ""
    if isinstance(word, bool) or not str(word).strip():
        return word or None, option.flag
    text = str(word).strip()
    try:
        return option.typed(text), f"ini {option.ini} ="
    except OptionError as error:
        raise UsageError(f"ini {option.ini} = {text}: {error}") from None


def _path(option: Option, where: str, value: str | Path | None, home: Path, front: str) -> Path | None:
    """Return what ``value`` names from ``home``. Found out now, not after hours of training."""
    if option.path == "store":
        if value is None and front in option.fronts:
            return usual_history()
        if value == _OFF:
            return None
    if value is None:
        return None
    if value == "":  # a shell's variable that is not set
        raise UsageError(f"{where} '': expected a path{f', or {_OFF}' if option.path == 'store' else ''}")
    path = home / Path(value).expanduser()
    if option.path == "folder":
        if why := why_no_folder(path):
            raise UsageError(f"{where} {why}")
    elif option.path != "source" and (path.is_dir() or not path.parent.is_dir()):
        off = f"; or {_OFF}, which keeps no history" if option.path == "store" else ""
        what = "a folder, expected a file; name one in it" if path.is_dir() else "not a file in a folder that exists"
        raise UsageError(f"{where} {path}: {what}{off}")
    elif option.path == "file" and (why := "it ends in .py" if path.suffix == ".py" else refused_at(path)):
        raise UsageError(f"{where} {path}: cannot be written ({why}); name a file where you may write")
    return path


def _refuse_what_does_not_go_together(front: str, said: Namespace, values: Mapping[str, Any]) -> None:
    if values["reason"].strip() and values["update"] is None:
        raise UsageError("--perf-reason says why a baseline changes; it goes with --update-baselines")
    for alone, what in ALONE.items():
        named = [one.flag for _, one in table(Settings) if alone in one.not_with and getattr(said, one.dest, None)]
        if values[alone] and named:
            here = what.replace("--perf-static", "--static") if front == CHECK else what
            raise UsageError(f"{here}; it goes with no {named[0]}")
    if values["plan"] is not None and values["width_gpus"] is None:
        raise UsageError("--perf-plan tells which tests are of a width; it goes with --perf-width")


def _refuse_what_cannot_be(front: str, said: Namespace, values: Mapping[str, Any]) -> None:
    named, place = getattr(said, "perf_baselines", None), values["baselines"]
    is_read = not (values["against"] or values["soak_minutes"] or values["update"])
    if front in (PYTEST, CHECK) and named not in (None, Path("baselines")) and is_read and not place.is_dir():
        otherwise = "name one that is there, or record with --update-baselines, which makes it"
        raise UsageError(f"--perf-baselines {named}: no such folder; {otherwise}")
    least, most = values["launches"], getattr(said, "perf_max_launches", None)
    if most is not None and least > most:
        advice = "lower the one or raise the other"
        raise UsageError(f"--perf-launches {least} is more than --perf-max-launches {most}; {advice}")
    machine = values["machine"]
    if machine and (Path(machine).name != machine or machine.startswith(".")):
        where = f"ini perf_machine = {machine}" if front == PYTEST else f"--machine {machine}"
        raise UsageError(f"{where}: it names a folder; use letters, digits and dashes")
    if values["report"] is not None:
        from pytest_llmperf.report.page import missing

        if why := missing():
            raise UsageError(f"--perf-report {values['report']}: {why}")


def _refuse_unknown_fault() -> None:
    """Found out now, not by the first rank of each case."""
    if "LLMPERF_INJECT" not in os.environ:
        return
    from pytest_llmperf.settings.train_spec import Injection

    try:
        Injection.from_environment()
    except ValueError as error:
        raise UsageError(str(error)) from None


def _slurm(ini: Callable[[str], Any]) -> SlurmOptions:
    from pytest_llmperf.launch.site import SlurmOptions

    words = {name: str(ini(f"perf_slurm_{name}")).strip() for name in SLURM_INI}
    found = {}
    for name in ("prefix", "modules", "srun"):
        try:
            found[name] = tuple(shlex.split(words[name]))
        except ValueError as error:
            raise UsageError(f"ini perf_slurm_{name} = {words[name]}: not words of a shell ({error})") from None
    cpu_bind = words["cpu_bind"] or SlurmOptions.cpu_bind
    return SlurmOptions(**found, python=words["python"], scratch=words["scratch"], cpu_bind=cpu_bind)


def _width(gpus: int | None, path: Path | None) -> Width | None:
    if gpus is None:
        return None
    from pytest_llmperf.records.results_document import ResultsError, ResultsFile
    from pytest_llmperf.run.findings import Width, is_whole

    if path is None:
        return Width(gpus=gpus)
    try:
        file = ResultsFile.read(path)
        if "planned" not in file.values:
            raise ResultsError(f"{path}: no planned cases in it")
    except ResultsError as error:
        raise UsageError(
            f"--perf-plan {path}: not a plan ({error}); write one with --perf-dry-run --perf-json FILE"
        ) from None
    found: dict[str, int] = {}
    for case in file.document.planned:
        found[case.nodeid] = max(case.width, found.get(case.nodeid, case.width))
    return Width(gpus=gpus, plan=found, is_whole=is_whole(file.document))


def _environment(python: str) -> str:
    """Tell its environment from others: one may be reached by several paths, and two may share an interpreter."""
    script = "import os, sys; print(os.path.realpath(sys.prefix), sys.implementation.cache_tag)"
    # Isolated, since it is none of this folder's; asked, since a link says nothing of the prefix.
    words = [python, "-I", "-c", script]
    try:
        ran = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=_ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--perf-against {python}: {error}; expected a Python that runs") from error
    answer = ran.stdout.splitlines()  # whatever the environment prints at its start comes before
    if ran.returncode or not answer:
        said = (ran.stderr.splitlines() or ["it did not answer"])[-1]
        raise UsageError(f"--perf-against {python}: {said}; expected a Python that runs")
    return answer[-1]
