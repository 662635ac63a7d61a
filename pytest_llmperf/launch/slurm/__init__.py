"""Launches in a SLURM job: what the job holds, srun's steps on its nodes, which node is to blame.

``slurm_site`` is what a run asks. A launch is a step whose ``node_agent`` on each node asks that node's ``node_server``
for a fork; ``node_servers`` is the run's side of those. ``allocation`` is pure; ``controller`` and ``cluster`` ask. May
import: what ``launch`` may.
"""
