"""From launches to a verdict. Pure, but for ``store.py``, which reads and writes baselines.

``validity`` and ``learning_checks`` say whether a launch may count, ``policy`` by what it is judged, ``verdict``
decides with ``stats``, ``early_stop`` says before a launch which step times pass, ``exact`` decides without tolerance,
``acceptance`` what may become a baseline. ``noise`` and ``gpu_knowledge`` know why launches differ.
"""
