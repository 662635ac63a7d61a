"""A text whose tokens are dear: long documents, each one word to a tokenizer that merges pairs of its letters."""

from __future__ import annotations

import json
import random
from pathlib import Path
from string import ascii_lowercase
from typing import Any

_END = "<|endoftext|>"


def write(folder: Path, *, documents: int, letters: int) -> dict[str, Any]:
    """The text and the tokenizer in ``folder``, as a spec names them. Each document is ``letters`` long, or half."""
    drawn = random.Random(1)
    # No space: byte-pair merging is of a word, and a word is all that there is.
    texts = ["".join(drawn.choices(ascii_lowercase, k=letters // (1 + number % 2))) for number in range(documents)]
    (folder / "slow.txt").write_text("\n\n".join(texts), encoding="utf-8")
    pairs = [(a, b) for a in ascii_lowercase for b in ascii_lowercase[:12]]
    vocabulary = [*ascii_lowercase, *(a + b for a, b in pairs), _END]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": len(vocabulary) - 1, "content": _END, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        ],
        "model": {
            "type": "BPE",
            "vocab": {word: number for number, word in enumerate(vocabulary)},
            "merges": [f"{a} {b}" for a, b in pairs],
        },
    }
    (folder / "slow.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return {"data": "text", "text": str(folder / "slow.txt"), "tokenizer": str(folder / "slow.json")}
