"""The training configuration: its fields, what cannot be, its identity, which specs are of one training.

``train_spec.TrainSpec`` is the noun; ``models`` and ``configs/`` are the architectures, ``choices`` what may be chosen,
``requirements`` what a spec needs of a machine. May import: ``support``.
"""
