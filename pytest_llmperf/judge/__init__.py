"""From launches to a verdict. Pure, but for ``store.py``, which reads and writes baselines.

``validity`` says whether a launch may count, ``policy`` by what it is judged, ``verdict``
decides with ``sequential_test``, ``foresight`` says before a launch what will, ``exact_changes`` without tolerance,
``acceptance`` what may become a baseline. May import: ``records``, ``spec``, ``support``.
"""
