"""What ``list`` and ``show`` say of loss curves, which no machine kind has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_llmperf.cli.baseline_curves import StoredCurves
from pytest_llmperf.cli.screen import Screen, facts, plain, table
from pytest_llmperf.judge.curves.curve_baseline import CurveBaseline
from pytest_llmperf.judge.curves.loss_parts import spans
from pytest_llmperf.judge.curves.seed_spread import spreads
from pytest_llmperf.report.table import Column
from pytest_llmperf.support import formats


def curve_page(path: Path, found: CurveBaseline, screen: Screen) -> list[str]:
    """Everything about the loss curves in ``path``."""
    return [plain(found.id), *facts(_about(path, found)), "", *_parts(found, screen)]


def curve_list_page(stored: Sequence[StoredCurves], screen: Screen) -> list[str]:
    """A table of all, or nothing."""
    if not stored:
        return []
    baselines = [one.baseline for one in stored]
    columns = [
        Column("loss curves of", [plain(one.id) for one in baselines], right=False),
        Column("seeds", [str(len(one.seeds)) for one in baselines]),
        Column("steps", [str(one.steps) for one in baselines]),
        Column("trained on", [plain(one.device) or formats.ABSENT for one in baselines], right=False),
        Column("accepted", [plain(one.recorded_at)[:10] for one in baselines], right=False),
    ]
    return table(columns, screen)


def _about(path: Path, found: CurveBaseline) -> Mapping[str, object]:
    return {
        "loss curves": f"{len(found.curves)} seeds ({', '.join(map(str, found.seeds))}) of {found.steps} steps",
        "digest": found.digest,
        "file": path,
        "recorded by": found.recorded_by,
        "accepted": f"{found.recorded_at[:10]}" + (f" ({found.reason})" if found.reason else ""),
        "device": found.device,
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(found.versions.items())),
    }


def _parts(found: CurveBaseline, screen: Screen) -> list[str]:
    parts = spreads(list(found.losses.values()))
    return table(
        [
            Column("steps", [f"{span.first} to {span.last}" for span in spans(found.steps)]),
            Column("loss", [f"{part.mean:.4f}" for part in parts]),
            Column("sd of seeds", [f"{part.sd / part.mean:.2%}" for part in parts]),
            Column("is nothing", [f"{part.nothing / part.mean:.2%}" for part in parts]),
        ],
        screen,
    )
