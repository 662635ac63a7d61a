"""Inside torchrun: trains one spec by a recipe, and leaves what ``observe`` saw of it.

The launcher starts ``python -m pytest_llmperf.worker FOLDER`` once per rank. What crosses is files in ``FOLDER``:
``request.json`` in; ``rank-<r>.pid``, ``progress.json``, ``failure-<r>.json`` and ``launch.json`` out, and while steps
are traced ``measured.json``. Imports only ``observe`` and the nouns."""
