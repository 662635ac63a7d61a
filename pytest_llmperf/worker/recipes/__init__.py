"""Ways to train a spec: a module each, with ``train`` (as ``huggingface.trainer`` has it) and perhaps a ``parity``."""
