"""The run that a command makes of its arguments; what cannot be had is its usage error, before anything is launched."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from pytest_llmperf.run.errors import UsageError
from pytest_llmperf.run.reading import read_settings
from pytest_llmperf.run.run import Run


def asked_run(arguments: argparse.Namespace, front: str, **fixed: Any) -> Run:
    """On hardware that is there; ``fixed`` are settings that the command's own options say."""
    with usage_errors(arguments):
        run = Run(read_settings(front, arguments, here=Path.cwd(), rootdir=Path.cwd(), **fixed), rootdir=Path.cwd())
        _ = run.machine_kind
    return run


@contextmanager
def usage_errors(arguments: argparse.Namespace) -> Iterator[None]:
    """Ends the command as argparse does, where what was asked for cannot be had."""
    try:
        yield
    except UsageError as error:
        usage: Callable[[str], NoReturn] = arguments.usage
        usage(str(error))
