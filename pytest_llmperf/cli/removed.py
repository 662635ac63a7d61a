"""Commands and options that are gone: each answers in one line that says what to use instead."""

from __future__ import annotations

from collections.abc import Sequence

_COST = "`llmperf report --tables` has the cost efficiency of widths, and --perf-price the cost of each case"

_EVENTS = "read --perf-json, or chart with --perf-history and `llmperf history`"
_TRACKERS = "this tracker reads pytest-benchmark's file: pytest --benchmark-json FILE"

#: By a command, alone or with its words.
_REMOVED = {
    "predict": "measure the width instead: pytest --gpus N; `llmperf report --tables` has its efficiency",
    "baselines merge": "take one side (git checkout --ours or --theirs), and record the case anew",
    "report --purpose": _COST,
    "report --losses": "--perf-json has the loss of each step, and perf_loss_curve holds them against a baseline",
    "report --samples": "an epoch is ceil(samples / sequences of an optimizer step) steps",
    "export --format tensorboard": _EVENTS,
    "export --format bencher": _TRACKERS,
    "export --format github-benchmark": _TRACKERS,
}


def refusal(argv: Sequence[str]) -> str:
    """Why nothing answers to ``argv``, in one line; empty where all of it may still be asked."""
    given = [part for word in argv for part in word.split("=", 1)]
    for name, instead in _REMOVED.items():
        command, *words = name.split()
        if given[:1] == [command] and any(given[at : at + len(words)] == words for at in range(1, len(given) + 1)):
            return f"{name!r} was removed: {instead}"
    return ""
