"""Shared settings of the tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.template import Template

# Few users set it, and with it a line that nobody flushes is seen in time.
os.environ.pop("PYTHONUNBUFFERED", None)

# A shared machine may pause any test for longer than hypothesis' 200 ms.
settings.register_profile("llmperf", deadline=None)
settings.load_profile("llmperf")


@pytest.fixture(scope="session", autouse=True)
def _pytest_is_forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What ``pytester`` runs in a process of its own is forked from one that has imported pytest."""
    popen = pytest.Pytester.popen
    templates: list[Template] = []  # started with the first test that runs one

    def forked(pytester: pytest.Pytester, command: Any, stdout: Any, stderr: Any, **others: Any) -> Any:
        words = list(map(str, command))
        if words[:2] != [sys.executable, "-mpytest"] or not hasattr(stdout, "fileno"):
            return popen(pytester, command, stdout, stderr, **others)
        templates[:] = templates or [Template(tmp_path_factory.mktemp("template"))]
        if not templates[0].fits(os.environ):
            return popen(pytester, command, stdout, stderr, **others)
        return templates[0].popen(words[2:], stdout, stderr)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytest.Pytester, "popen", forked)
        yield
    for template in templates:
        template.close()
