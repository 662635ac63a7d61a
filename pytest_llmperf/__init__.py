"""pytest-llmperf: hold the throughput and memory of LLM training against stored baselines."""

from pytest_llmperf.spec.train_spec import TrainSpec

__all__ = ["TrainSpec"]
__version__ = "0.1.0"
