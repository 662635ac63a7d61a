"""``python -m pytest_llmperf.worker.estimate``: what steps will be, predicted in forks.

Standard input holds a request a line, until its end: ``{"spec", "model_config"}``, and ``"operators": true`` where
these are to be counted too. Standard output gets an answer a line as soon as it is known: ``{"number": of the request,
from 0, "parts": {…}}``, or an ``error`` in the parts' place. A request of ``{"model_config", "sequence_length"}`` is
for arithmetic, and has ``flops_per_token`` in that place."""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # the imports make nothing but what stays, and to look through it takes a tenth of their time
    from pytest_llmperf.worker.estimate.prediction_server import serve

    sys.exit(serve(sys.stdin.fileno(), sys.stdout.fileno()))
