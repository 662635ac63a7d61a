"""What the command's options take, for argparse: each refuses in one line what it is not."""

from __future__ import annotations

import argparse

from pytest_llmperf.support import quantities
from pytest_llmperf.support.quantities import argument

count = argument(quantities.count, "a whole number of at least 1")
amount = argument(quantities.positive, "a number above 0")
duration = argument(quantities.duration_hours, "a time above 0, e.g. 24h, 2d, 1d12h or 90m")
tokens = argument(quantities.tokens, "a number of tokens, e.g. 1e9, 300B or 1.5T")
mail = argument(quantities.mail, "an address, or several with commas; none begins with -")
currency = argument(quantities.currency, "a currency, e.g. EUR")


def points(text: str) -> dict[int, float]:
    """``1:72300,2:70100``: GPUs and tokens/s per GPU."""
    found: dict[int, float] = {}
    for word in text.split(","):
        left, _, right = word.strip().partition(":")
        gpus, rate = quantities.count(left), quantities.positive(right)
        if gpus is None or rate is None:
            raise argparse.ArgumentTypeError(f"{word.strip()!r}: expected GPUS:TOKENS_PER_SECOND_PER_GPU, e.g. 8:69200")
        if gpus in found:
            raise argparse.ArgumentTypeError(f"{gpus} GPUs are given twice, expected once")
        found[gpus] = rate
    return found


def instants(text: str) -> list[float]:
    """``10,20,35``: seconds, sorted."""
    found = {word.strip(): quantities.positive(word.strip()) for word in text.split(",")}
    wrong = [word for word, seconds in found.items() if seconds is None]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r}: expected seconds above 0, e.g. 10,20,35")
    return sorted({seconds for seconds in found.values() if seconds is not None})
