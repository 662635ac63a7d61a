"""``--perf-width``: of a suite's tests those that ask for one number of GPUs, as a night runs each width by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_llmperf.run.coverage import is_whole
from pytest_llmperf.run.width import Width
from pytest_llmperf.support import quantities
from pytest_llmperf.support.quantities import argument


def add_options(group: pytest.OptionGroup) -> None:
    """Register the command line's."""
    group.addoption(
        "--perf-width",
        type=argument(quantities.count, "a number of GPUs, 1 or more"),
        metavar="N",
        help="run only the tests whose widest spec asks for N GPUs (with --gpus 0: ranks on the CPU)",
    )
    group.addoption(
        "--perf-plan",
        metavar="FILE",
        help="what --perf-dry-run --perf-json wrote of the same tests: --perf-width knows them by it beforehand",
    )


def read(gpus: int | None, plan: Path | None) -> Width | None:
    """What was asked for.

    Raises:
        pytest.UsageError: a plan that is none, or that nobody needs.
    """
    if gpus is None:
        if plan is not None:
            raise pytest.UsageError("--perf-plan tells which tests are of a width; it goes with --perf-width")
        return None
    return _planned(gpus, plan) if plan is not None else Width(gpus=gpus)


def _planned(gpus: int, path: Path) -> Width:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        found: dict[str, int] = {}
        for case in values["planned"]:
            nodeid, width = str(case["nodeid"]), int(case["width"])
            found[nodeid] = max(width, found.get(nodeid, width))
        asked_all = is_whole(values)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise pytest.UsageError(
            f"--perf-plan {path}: not a plan ({type(error).__name__}: {error}); "
            "write one with --perf-dry-run --perf-json FILE"
        ) from None
    return Width(gpus=gpus, plan=found, is_whole=asked_all)


def select(width: Width | None, config: pytest.Config, items: list[pytest.Item]) -> set[str]:
    """Leave the tests of other widths out of ``items``; the node ids of those left out."""
    if width is None:
        return set()
    kept = {item.nodeid for item in items if width.selects(item.nodeid, is_case=is_case(item))}
    others = [item for item in items if item.nodeid not in kept]
    if others:
        items[:] = [item for item in items if item.nodeid in kept]
        config.hook.pytest_deselected(items=others)
    return {item.nodeid for item in others}


def is_case(item: pytest.Item) -> bool:
    """Whether a test measures."""
    return "perf" in getattr(item, "fixturenames", ())
