"""What pytest sees. This process never imports torch: training happens in the worker.

``hooks`` is the entry point, which waits for the first perf test; ``collector`` has the hooks of a session with a run,
``session`` that run with pytest's outcomes, ``perf`` the fixture. May import: every room but ``cli`` and ``worker``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_llmperf.run.options import Settings


def is_case(item: pytest.Item) -> bool:
    return "perf" in getattr(item, "fixturenames", ())


def settings_of(config: pytest.Config) -> Settings:
    """What this session was asked for; pytest.UsageError: an option that cannot be used."""
    from pytest_llmperf.run.options import PYTEST, UsageError
    from pytest_llmperf.run.reading import read_settings

    here, root = config.invocation_params.dir, config.rootpath
    try:
        return read_settings(PYTEST, config.option, here=here, rootdir=root, ini=config.getini)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
