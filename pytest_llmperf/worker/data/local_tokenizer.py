"""A tokenizer of the user's, from local files alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pytest_llmperf.worker.refusal import RefusedError

# How the families call it, where a bare tokenizer.json does not say which of its tokens that is.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class LocalTokenizer:
    """What transformers makes of the folder or file at a path.

    Raises:
        RefusedError: it makes nothing of it, or it has no token for the end of a text.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._own = _load(path)
        except Exception as error:  # noqa: BLE001 - a tokenizer's own code may raise anything
            reason = " ".join(str(error).split())
            raise RefusedError(
                f"tokenizer {path}: transformers cannot load it ({type(error).__name__}: {reason[:200]}); expected a "
                "folder as save_pretrained writes it, or a tokenizer.json"
            ) from None
        known = self._own.get_vocab()
        #: One more than the largest token.
        self.vocabulary_size: int = max(known.values(), default=-1) + 1
        own_end = self._own.eos_token_id
        end = own_end if own_end is not None else next((known[name] for name in _ENDS if name in known), None)
        if end is None:
            raise RefusedError(
                f"tokenizer {path}: it names no token that ends a text; expected eos_token in its tokenizer_config.json"
            )
        self.end_of_text: int = end
        padding = self._own.pad_token_id
        # As the courses do; what is padding is told by where it is.
        self.padding: int = end if padding is None else padding

    def encode(self, texts: Sequence[str], *, special: bool) -> list[np.ndarray]:
        """The tokens of each; ``special``: with those that the tokenizer puts around a text by itself."""
        found = self._own(list(texts), add_special_tokens=special, return_attention_mask=False, verbose=False)
        return [np.asarray(ids, dtype=np.int32) for ids in found["input_ids"]]


def _load(path: Path) -> Any:
    if path.is_file():
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
