"""A process of its own: one training step on tensors without storage, as on a GPU, for what its memory will be.

``prediction_server`` takes requests, ``memory_estimator`` runs the step of a spec and answers with bytes by purpose;
``arithmetic`` counts operators and their FLOPs; ``storages`` records what lives, for an allocator like CUDA's.
May import: ``worker.build`` and the nouns.
"""
