"""The tokenizer that needs no file: a token for each byte, one for the end of a text, one for padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_END_OF_TEXT, _PADDING = 256, 257


class ByteTokenizer:
    """UTF-8, byte by byte."""

    vocabulary_size = 258
    end_of_text = _END_OF_TEXT
    padding = _PADDING

    def encode(self, texts: Sequence[str], *, special: bool) -> list[np.ndarray]:  # noqa: ARG002 - it has none
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]
