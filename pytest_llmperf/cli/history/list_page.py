"""All cases: their last figure and their latest change point, worst first."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_llmperf.cli.history.case_page import WITH_HOST
from pytest_llmperf.cli.screen import Screen, plain, table
from pytest_llmperf.judge.history.case_history import CaseHistory
from pytest_llmperf.report.table import Column
from pytest_llmperf.support import formats

# Of a machine kind; those with a change point are all shown.
_MOST_CASES = 500
_NOTHING = "nothing that is recorded"


def list_page(histories: Sequence[CaseHistory], screen: Screen) -> list[str]:
    """A table for each machine kind."""
    lines = list[str]()
    for machine in dict.fromkeys(one.machine for one in histories):
        group = sorted((one for one in histories if one.machine == machine), key=_urgency)
        changed = sum(one.latest_change is not None for one in group)
        told = f"{len(group)} case{'s' * (len(group) != 1)}, {changed or 'none'} of them with a change point"
        # Whoever has to look at a case finds it in the first ones, and no terminal shows thousands at once.
        shown = group[: max(_MOST_CASES, changed)]
        lines += [*([""] if lines else []), f"{plain(machine)}: {told}", *_table(shown, screen)]
        if len(group) > len(shown):
            lines.append(f"{len(group) - len(shown)} more without a change point: name a part of an id, or add --json")
    return lines


def _urgency(one: CaseHistory) -> tuple[bool, bool, float, str]:
    latest = one.latest_change
    return latest is None, not one.steps, latest.change.rate if latest and latest.change else 0.0, one.id


def _table(group: Sequence[CaseHistory], screen: Screen) -> list[str]:
    projects = any(one.project for one in group)
    latest = [_latest(one) for one in group]
    return table(
        [
            Column("case", [plain(one.id) for one in group], right=False),
            *([Column("project", [plain(one.project) for one in group], right=False)] if projects else []),
            Column("runs", [str(len(one.results)) for one in group]),
            Column("last run", [one.results[-1].began[:10] for one in group], right=False),
            Column("tokens/s/GPU", [_last(one) for one in group]),
            Column("verdict", [plain(one.results[-1].verdict) for one in group], right=False, colored=True),
            Column("latest change", [one[0] for one in latest]),
            Column("since", [one[1] for one in latest], right=False),
            Column("what else changed", [one[2] for one in latest], right=False),
        ],
        screen,
    )


def _last(one: CaseHistory) -> str:
    return formats.tokens_per_second(one.results[-1].tokens_per_second_per_gpu)


def _latest(one: CaseHistory) -> tuple[str, str, str]:
    """The rate of its latest change, since when, and what else changed."""
    latest = one.latest_change
    if one.steps and (latest is None or one.steps[-1].began > latest.results[0].began):
        return formats.percent(one.steps[-1].rate), one.steps[-1].began[:10], WITH_HOST
    if latest is None:
        return formats.ABSENT, formats.ABSENT, formats.ABSENT
    more = len(latest.different) - 1
    different = plain(latest.different[0]) + (f" (+{more})" if more else "") if latest.different else _NOTHING
    return formats.percent(latest.change.rate if latest.change else None), latest.results[0].began[:10], different
