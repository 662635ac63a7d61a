"""From launches to a verdict. Pure, but for ``store.py``, which reads and writes baselines.

``validity`` says whether a launch may count, ``policy`` by what it is judged, ``verdict`` decides with ``stats``,
``exact`` without tolerance, ``acceptance`` what may become a baseline. ``gpu_knowledge`` knows why launches differ.
"""
