"""Templates: the scripts of a night and the cluster files to start from; one source, which people read in slurm/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest_llmperf
from pytest_llmperf.cli.command_error import ClusterError
from pytest_llmperf.support.suggestions import hint


def folder() -> Path:
    """Where they are: inside of an installed package, beside that of a checkout.

    Raises:
        ClusterError: in neither place.
    """
    package = Path(pytest_llmperf.__file__).parent
    places = [place / "slurm" for place in (package, package.parent)]
    for place in places:
        if (place / "nightly.sbatch").is_file():
            return place
    told = " or ".join(map(str, places))
    raise ClusterError(f"no nightly.sbatch in {told}; install pytest-llmperf anew, or name the script with --script")


def listed() -> Iterator[str]:
    """A line for each example: its name, and what its first line says of it."""
    examples = _examples()
    width = max(map(len, examples), default=0)
    for name, path in examples.items():
        yield f"{name:{width}}  {_lines(path)[0].removeprefix('; ')}"
    yield ""
    yield "llmperf submit --example NAME > my-cluster.ini writes one to start from"


def example(name: str) -> list[str]:
    """The lines of the example called ``name``.

    Raises:
        ClusterError: none is called so.
    """
    examples = _examples()
    path = examples.get(name.removesuffix(".ini"))
    if path is None:
        raise ClusterError(f"no example {name!r}{hint(name, examples)}; known: {', '.join(examples)}")
    return _lines(path)


def _examples() -> dict[str, Path]:
    return {path.stem: path for path in sorted((folder() / "clusters").glob("*.ini"))}


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()
