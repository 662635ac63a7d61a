"""The text and the tokenizers that the user names for this suite, in the environment."""

from __future__ import annotations

import os
from pathlib import Path

from pytest_llmperf import TrainSpec

_TEXT, _TOKENIZERS = os.environ.get("LLMPERF_TEXT"), os.environ.get("LLMPERF_TOKENIZERS")

#: Whose tokenizer a folder has to have.
MODELS = ("llama-3.2-1b", "opt-1.3b")


def _tokenizer(folder: str | None, model: str) -> str | None:
    return str(Path(folder) / model) if folder else None


def _trouble() -> str:
    """Why these cannot serve, in a line; a suite that cannot be imported would say so with a traceback."""
    try:
        for model in MODELS:
            TrainSpec(model=model, data="text", text=_TEXT, tokenizer=_tokenizer(_TOKENIZERS, model))
    except ValueError as error:
        named = {"LLMPERF_TEXT": _TEXT, "LLMPERF_TOKENIZERS": _TOKENIZERS}
        return f"{', '.join(f'{name}={value}' for name, value in named.items() if value)}: {error}"
    return ""


#: What the run says instead of its tests, where anything was named that cannot serve.
TROUBLE = _trouble() if _TEXT or _TOKENIZERS else ""

#: ``None``: the small one that ships.
TEXT = None if TROUBLE else _TEXT
# The lab slices to a tenth, and the small text that ships is none too large as a whole.
SPLIT = "train[:10%]" if TEXT else "train"


def tokenizer_of(model: str) -> str | None:
    """The folder with the tokenizer of ``model``; ``None``: bytes are its tokens."""
    return None if TROUBLE else _tokenizer(_TOKENIZERS, model)
