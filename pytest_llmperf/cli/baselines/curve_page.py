"""What ``show`` says of a file of loss curves, which no machine kind has and no id names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pytest_llmperf.cli.screen import Screen, facts, plain, table
from pytest_llmperf.judge import store
from pytest_llmperf.judge.curves.curve_baseline import LOSS_CURVES, CurveBaseline
from pytest_llmperf.judge.curves.loss_parts import spans
from pytest_llmperf.judge.curves.seed_spread import spreads
from pytest_llmperf.report.table import Column


def curve_page(case: str, screen: Screen) -> list[str] | None:
    """The page of the file ``case``, if it is one of loss curves.

    Raises:
        BaselineError: it cannot serve.
    """
    path = Path(case)
    if path.absolute().parent.name != LOSS_CURVES:
        return None
    found = store.read(path, CurveBaseline.from_json)
    return None if found is None else [plain(found.id), *facts(_about(path, found)), "", *_parts(found, screen)]


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
