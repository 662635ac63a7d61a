"""From a spec to a launch record: hardware, leases, and the process tree that torchrun starts.

``site`` is what a run asks: ``local`` launches here, ``slurm/`` on a job's nodes. ``device`` knows the GPUs and
``request`` what is launched; ``process`` watches and reaps, ``outcome`` reads what the ranks left. May import:
``records``, ``settings``, ``support``."""
