"""Launches in a SLURM job: what the job holds, srun's steps on its nodes, which node is to blame.

Pure parts (``allocation``, ``node_failures``) beside those that ask (``controller``, ``cluster``). May import: what
``launch`` may.
"""
