"""Launches in a SLURM job: what the job holds, srun's steps on its nodes, which node is to blame.

``slurm_site`` is what a run asks. A launch is a step whose agent on each node asks that node's server for a fork (both
in ``node``); ``node_servers`` is the run's side of those. ``controller`` knows the job, ``cluster`` its nodes. May
import: what ``launch`` may."""
