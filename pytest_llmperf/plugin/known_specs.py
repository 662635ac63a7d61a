"""What collected tests will ask about, as far as their parameters tell it: predictions of it can begin at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from pytest_llmperf.plugin.options.width_options import is_case
from pytest_llmperf.plugin.outcomes import DidNotTrain
from pytest_llmperf.settings.train_spec import TrainSpec


def specs_of(items: Iterable[pytest.Item]) -> Iterator[TrainSpec]:
    """The specs among the parameters of ``items``, or in a field ``spec`` of one, in the order of the tests."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is None or not is_case(item):
            continue
        for value in callspec.params.values():
            spec = value if isinstance(value, TrainSpec) else getattr(value, "spec", None)
            if isinstance(spec, TrainSpec):
                yield spec


def expect_no_failed_launch(items: Iterable[pytest.Item]) -> None:
    """Where nothing is launched no launch fails: who expects that of a case would call its pass a surprise."""
    for item in items:
        for node in item.listchain():
            node.own_markers[:] = [mark for mark in node.own_markers if not _is_of_a_launch(mark)]


def _is_of_a_launch(mark: pytest.Mark) -> bool:
    return mark.name == "xfail" and mark.kwargs.get("raises") is DidNotTrain
