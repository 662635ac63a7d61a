"""From launches to a verdict: whether a launch may count (``validity``), by what it is judged (``policy``, ``stats``),
what is decided (``verdict``, ``exact``), what may become a baseline (``acceptance``), why launches differ (``gpu_…``).
Pure, but for ``store``, which reads and writes baselines."""
