"""The fixtures a test composes its case from; each of the first six can be overridden or parametrized."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_llmperf.plugin.waiting import session_of

if TYPE_CHECKING:
    from pytest_llmperf.plugin.perf import Perf
    from pytest_llmperf.settings.train_spec import TrainSpec


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """A built-in name, the path of a configuration, or a cached hub name."""
    session = session_of(request.config)
    with session.outcomes():
        return "llama-tiny" if session.on_cpu else "llama-3.2-1b"


@pytest.fixture
def precision() -> str:
    """One word for weights, autocast and TF32: ``fp32``, ``tf32``, ``bf16-mixed``, ``bf16``, …"""
    return "bf16"


@pytest.fixture
def attention() -> str:
    """``eager``, ``sdpa``, ``flash_attention_2`` or ``flex_attention``."""
    return "sdpa"


@pytest.fixture
def liger() -> bool:
    """Whether Liger's kernels replace the model's."""
    return False


@pytest.fixture
def micro_batch_size() -> int:
    """Sequences per rank and forward pass."""
    return 1


@pytest.fixture
def gpus() -> int:
    """World size of the case: GPUs, or gloo ranks on the CPU."""
    return 1


@pytest.fixture
def train_spec(  # noqa: PLR0913, PLR0917 - one argument for each setting that a test can override
    request: pytest.FixtureRequest,
    model: str,
    precision: str,
    attention: str,
    liger: bool,
    micro_batch_size: int,
    gpus: int,
) -> TrainSpec:
    """The case composed from the six settings, short on the CPU; an impossible one is one line, not a traceback."""
    from pytest_llmperf.plugin.outcomes import failed
    from pytest_llmperf.settings.train_spec import TrainSpec, precision_fields

    session = session_of(request.config)
    with session.outcomes():
        on_cpu = session.on_cpu  # few tokens and steps there, so that trying a test takes seconds
    try:
        return TrainSpec(
            model=model,
            **precision_fields(precision),
            attention=attention,
            liger=liger,
            micro_batch_size=micro_batch_size,
            gpus=gpus,
            sequence_length=64 if on_cpu else 1024,
            steps=20 if on_cpu else 60,
        )
    except ValueError as error:
        raise failed(str(error)) from None


@pytest.fixture
def perf(request: pytest.FixtureRequest) -> Perf:
    """Measures, judges and asserts: ``perf.check(train_spec)``."""
    from pytest_llmperf.plugin.perf import Perf

    return Perf(request, session_of(request.config))
