"""What one run knows while it lasts: where its files go, what it has found, its SLURM job, what it costs.

No module here judges or launches. May import: ``launch``, ``judge``, ``analysis``, ``report`` and what is below them.
"""
