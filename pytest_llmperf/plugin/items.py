"""The tests of a run: which were chosen, what they ask about, and why others were left out."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_llmperf.plugin import is_case
from pytest_llmperf.plugin.reports import DidNotTrain
from pytest_llmperf.run.findings import Width
from pytest_llmperf.run.reading import without_effect
from pytest_llmperf.settings.spec import Spec
from pytest_llmperf.support.files import baselines_above
from pytest_llmperf.support.user_input import nearest

if TYPE_CHECKING:
    from pytest_llmperf.plugin.collector import PerfSession

# Ini values that, given for one run, change what is collected.
_COLLECTING = (
    "collect_imported_tests norecursedirs python_classes python_files python_functions pythonpath testpaths".split()
)


def specs_of(items: Iterable[pytest.Item]) -> Iterator[Spec]:
    """The specs among the parameters of ``items``, or in a field ``spec`` of one, in the order of the tests."""
    for item in filter(is_case, items):
        for value in getattr(getattr(item, "callspec", None), "params", {}).values():
            spec = value if isinstance(value, Spec) else getattr(value, "spec", None)
            if isinstance(spec, Spec):
                yield spec


def trains_by_recipe(items: Sequence[pytest.Item]) -> bool:
    """Whether any of ``items`` is seen to, before it runs."""
    takes = any("train_spec" in getattr(item, "fixturenames", ()) for item in items)
    return takes or not all(spec.is_script for spec in specs_of(items))


def expect_no_failed_launch(items: Iterable[pytest.Item]) -> None:
    """Where nothing is launched no launch fails: who expects that of a case would call its pass a surprise."""
    for item in items:
        for node in item.listchain():
            marks = node.own_markers
            marks[:] = [each for each in marks if each.name != "xfail" or each.kwargs.get("raises") is not DidNotTrain]


def select(width: Width | None, config: pytest.Config, items: list[pytest.Item]) -> set[str]:
    """Leave the tests of other widths out of ``items``; the node ids of those left out."""
    if width is None:
        return set()
    kept = {item.nodeid for item in items if width.selects(item.nodeid, is_case=is_case(item))}
    if others := [item for item in items if item.nodeid not in kept]:
        items[:] = [item for item in items if item.nodeid in kept]
        config.hook.pytest_deselected(items=others)
    return {item.nodeid for item in others}


def partly(config: pytest.Config) -> Iterator[str]:
    """Why this run's options may have left out tests of a file that was collected."""
    for argument in config.args:
        if "::" in argument:
            yield argument
    if config.getoption("lf", default=False):
        yield "--last-failed"
    yield from (f"-o {name}" for name in _overridden(config) if name in ("python_classes", "python_functions"))


def gaps(config: pytest.Config, baselines: Path, recorded_by: Iterable[str]) -> Iterator[str]:
    """Why tests that this run did not collect may use ``baselines``, which tests of these files recorded."""
    root = config.rootpath.resolve()
    for name in ("ignore", "ignore_glob"):
        if config.getoption(name, default=None):
            yield f"--{name.replace('_', '-')}"
    yield from (f"-o {name}" for name in _overridden(config) if name in _COLLECTING)
    if not _within(baselines.resolve(), [root]):
        yield f"{baselines} is not under rootdir, other suites may use it"
    collected = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    if _within(root, collected):
        return
    outside = sorted(file for file in set(recorded_by) if not _within((root / file).resolve(), collected))
    whole = f"run `pytest {'.' if root == config.invocation_params.dir.resolve() else root}`"
    # What the project's ini file names as its suite; nothing where another ini file was asked for.
    patterns = [] if config.getoption("inifilename", default=None) else config.getini("testpaths")
    found = (glob.glob(str(config.rootpath / pattern), recursive=True) for pattern in patterns)  # noqa: PTH207 - as pytest
    named = [Path(path).resolve() for paths in found for path in paths]
    if named and all(_within(path, collected) for path in named):
        if outside:
            yield f"{outside[0]}, which recorded a baseline, is not in testpaths; {whole}"
    # A folder in which every baseline was recorded is where the suite lives.
    elif outside or not all(folder.is_dir() for folder in collected):
        yield f"{' '.join(config.args)}: not {'testpaths' if named else 'rootdir'}; {whole}"


def _overridden(config: pytest.Config) -> list[str]:
    return [item.partition("=")[0].strip() for item in config.getoption("override_ini", default=None) or ()]


def _within(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def baselines_further_up(config: pytest.Config) -> str:
    """A line about baselines further up that this run does not see: pytest took a sub-folder; else empty."""
    option, root = config.option, config.rootpath
    is_said = config.inipath is not None or option.perf_baselines or config.getoption("rootdir", default=None)
    if is_said or (found := baselines_above(root / "baselines")) is None:
        return ""
    taken = f"no baselines in {root}, which pytest takes for its rootdir, and {found} has some"
    return f"{taken}: use them with --rootdir={found.parent} or --perf-baselines={found}"


def _slips(keyword: str, collected: Iterable[str], markers: Iterable[str]) -> list[str]:
    """Of a -k that left no test what its words may have meant, by two letters of four at most; it has markers, too."""
    known, asked = ({*re.findall(r"[\w.]+", text)} for text in (" ".join([*collected, *markers]), keyword))
    others = {word for word in asked - {"and", "or", "not"} if not any(word.lower() in one.lower() for one in known)}
    near = {word: nearest(word, known, 0.75) for word in sorted(others)}
    return [f"llmperf: no perf test has {word}, did you mean -k {one}?" for word, one in near.items() if one]


def header(session: PerfSession, items: list[pytest.Item]) -> list[str]:
    """About where the cases run, and what they do not see; nothing where no perf test was collected."""
    cases = sum(map(is_case, items))
    if not cases or session.config.get_verbosity() < 0:
        markers = (re.split(r"\W", line)[0] for line in session.config.getini("markers"))
        return [] if items else _slips(session.config.option.keyword, session.collected, markers)
    where = f"{session.num_gpus} GPU(s)" if not session.on_cpu else "the CPU (gloo)"
    where = "no GPU is used" if session.settings.static else where
    baselines = os.path.relpath(session.settings.baselines, session.config.invocation_params.dir)
    hidden = "" if session.settings.against else baselines_further_up(session.config)
    ignored = without_effect(session.config.option) if session.settings.static else ""
    shown = f"{cases} case(s) on {session.machine_kind}, {where}, baselines {baselines}"
    return [f"llmperf: {line}" for line in (shown, ignored, hidden) if line]
