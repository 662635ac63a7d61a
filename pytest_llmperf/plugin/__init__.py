"""What pytest sees. This process never imports torch: training happens in the worker.

``hooks`` is the entry point, which waits for the first perf test; ``collector`` has the hooks of a session with a run,
``session`` that run with pytest's outcomes, ``perf`` the fixture. The only room that imports pytest. May import: every
room but ``cli`` and ``worker``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def is_case(item: pytest.Item) -> bool:
    """Whether a test measures."""
    return "perf" in getattr(item, "fixturenames", ())
