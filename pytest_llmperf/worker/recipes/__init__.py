"""Ways to train a spec: a module each, with ``train`` (``worker.rank_job.Recipe``) and perhaps a ``parity``."""
