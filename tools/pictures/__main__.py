"""Make them: ``python -m tools.pictures [docs/pictures] [--only ladder terminal page]``.

``ladder`` is both ladders of the committed baselines, drawn by Vega-Lite (``pip install 'pytest-llmperf[page]'``).
``terminal`` is what pytest prints here, on this CPU, of tiny models: a run and a failure, two minutes of real training
(``pip install pyte``). ``page`` is that of each rung's newest session, judged against the sessions before it, as
Chromium shows it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_llmperf.analysis import ladder as chapter15
from pytest_llmperf.judge.baseline import BaselineStore
from tools.pictures import ladder, page, terminal
from tools.pictures.drawing import drawn

_MACHINE = "nvidia-h200-140gib"


def _ladder(folder: Path) -> list[Path]:
    (picture,) = drawn([ladder.both(BaselineStore(Path("baselines")))])
    path = folder / "ladder.svg"
    path.write_text(ladder.with_dark(picture), encoding="utf-8")
    return [path]


def _terminal(folder: Path) -> list[Path]:
    paths = []
    with tempfile.TemporaryDirectory() as work:
        for name, (command, printed) in terminal.runs(Path(work)).items():
            path = folder / f"{name}.svg"
            path.write_text(terminal.picture(command, printed), encoding="utf-8")
            paths.append(path)
    return paths


def _page(folder: Path) -> list[Path]:
    path = folder / "page.png"
    with tempfile.TemporaryDirectory() as work:
        html = page.written(page.night(chapter15.LADDERS[0], BaselineStore(Path("baselines")), _MACHINE), Path(work))
        page.photographed(html, path)
    return [path]


_PICTURES: dict[str, Callable[[Path], list[Path]]] = {"ladder": _ladder, "terminal": _terminal, "page": _page}


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("docs/pictures"))
    parser.add_argument("--only", choices=tuple(_PICTURES), nargs="+", default=tuple(_PICTURES))
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        for path in _PICTURES[name](arguments.folder):
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
