"""``--perf-width``: of a suite's tests those that ask for one number of GPUs, as a night runs each width by itself.

What a test asks for is known when it has asked: a dry run of all tests (``--perf-plan``) tells it beforehand, and a
test of which that tells nothing is held to the first spec that it asks for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pytest_llmperf.run.findings import Elsewhere
from pytest_llmperf.spec.train_spec import TrainSpec
from pytest_llmperf.support import quantities
from pytest_llmperf.support.quantities import argument


@dataclass(frozen=True, kw_only=True)
class Width:
    """The number of GPUs, or of ranks on the CPU, whose tests are to run."""

    gpus: int
    plan: Mapping[str, int] | None = None
    """By node id, the widest spec that a test asks for; ``None``: nobody has asked them."""
    is_whole: bool = True
    """Whether every test was asked."""

    def selects(self, nodeid: str, *, is_case: bool) -> bool:
        """Whether a test may be of this width; one that asked for nothing, and has no ``perf``, is of none."""
        if self.plan is not None and nodeid in self.plan:
            return self.plan[nodeid] == self.gpus
        return is_case or self.plan is None or not self.is_whole

    def knows(self, nodeid: str) -> bool:
        """Whether the plan tells what the test asks for."""
        return self.plan is not None and nodeid in self.plan


@dataclass
class Held:
    """One test of a run of one width, while it asks."""

    width: Width | None
    nodeid: str
    begun: bool = field(default=False, init=False)
    """Whether it has asked for anything yet."""

    def elsewhere(self, specs: Sequence[TrainSpec], most: int) -> tuple[Elsewhere, str]:
        """What is not of this width where specs that belong together are, and why; empty where they are.

        At ``most`` so many GPUs, or ranks on the CPU, are here: a night's job may hold fewer than its width.
        """
        if self.width is None:
            return "", ""
        asked, gpus = max(spec.gpus for spec in specs), self.width.gpus
        first = not self.begun and not self.width.knows(self.nodeid)
        self.begun = True
        if first and asked != gpus:
            return "test", f"asks for {asked} GPU(s), and this run is for tests of {gpus} (--perf-width)"
        if asked > gpus:
            why = f"asked for {asked} GPUs after {gpus}, at whose width the test runs: ask for the widest first"
            return "case", why
        if asked > most:
            return "case", f"asks for {asked} GPUs or ranks, and its job has {most}"
        return "", ""


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
        suite = values["suite"]
        asked_all = {*suite["coverage"]["nodes"]} <= {*suite["coverage"]["said"]}
        is_whole = asked_all and not suite["stopped"] and not values.get("unfinished")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise pytest.UsageError(
            f"--perf-plan {path}: not a plan ({type(error).__name__}: {error}); "
            "write one with --perf-dry-run --perf-json FILE"
        ) from None
    return Width(gpus=gpus, plan=found, is_whole=is_whole)


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
