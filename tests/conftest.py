"""Shared settings of the tests."""

from __future__ import annotations

from hypothesis import settings

# A shared machine may pause any test for longer than hypothesis' 200 ms.
settings.register_profile("llmperf", deadline=None)
settings.load_profile("llmperf")
