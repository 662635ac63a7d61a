"""What one run was asked for, and knows while it lasts: where its files go, what it has found, its SLURM job, its cost.

No module here judges or launches. May import: ``launch``, ``judge``, ``analysis``, ``report`` and what is below them.
"""
