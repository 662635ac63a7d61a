"""Facts of the session that a conftest may ask for, to choose what its tests are of."""

from __future__ import annotations

import pytest

from pytest_llmperf.plugin.session import SESSION


def is_active(config: pytest.Config) -> bool:
    """Whether the plugin takes part in this session: ``-p no:llmperf`` leaves it out."""
    return SESSION in config.stash


def on_cpu(config: pytest.Config) -> bool:
    """Whether the run's ranks train on the CPU, over gloo: ``--gpus 0``, or no GPU is visible.

    Raises:
        pytest.UsageError: the hardware that ``--gpus`` asks for is not there, or the plugin takes no part.
    """
    if not is_active(config):
        raise pytest.UsageError("pytest_llmperf.on_cpu: the plugin llmperf takes no part in this session")
    session = config.stash[SESSION]
    with session.outcomes():
        return session.on_cpu
