"""From a spec to a launch record: hardware, leases, and the process tree that torchrun starts.

``local`` launches here, ``slurm/`` on a job's nodes; ``process`` watches and reaps, ``outcome`` reads what the ranks
left. May import: ``records``, ``spec``, ``support``.
"""
