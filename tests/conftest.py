"""Shared settings of the tests."""

from __future__ import annotations

import os

from hypothesis import settings

# Few users set it, and with it a line that nobody flushes is seen in time.
os.environ.pop("PYTHONUNBUFFERED", None)

# A shared machine may pause any test for longer than hypothesis' 200 ms.
settings.register_profile("llmperf", deadline=None)
settings.load_profile("llmperf")
