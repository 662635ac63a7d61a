"""A process that has imported everything, from which launches are forked.

``fork_server`` is run and asked over a socket pair; ``agent`` is torchrun in a fork of it. ``preload`` is what it
imports, ``gpu_answers`` what libraries are told of GPUs that it must not touch, ``linux`` what the system knows of a
fork. May import: the nouns, and in a rank the worker.
"""
