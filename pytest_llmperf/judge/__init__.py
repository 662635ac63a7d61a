"""From launches to a verdict. Pure, but for ``store.py``, which reads and writes baselines."""
