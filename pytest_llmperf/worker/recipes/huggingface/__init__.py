"""A model of transformers, trained by its Trainer on random tokens or on a text."""

from pytest_llmperf.worker.recipes.huggingface.trainer import train

__all__ = ["train"]
