"""Ways to train a spec: a module each, found by the name in the order, with ``train`` (``worker.rank_job.Recipe``).

A recipe drives ``observe`` and returns what was seen. Small trainings for parity are its ``parity``, where it has one.
"""
