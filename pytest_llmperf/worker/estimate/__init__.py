"""A process of its own: one training step on tensors without storage, as on a GPU, for what its memory will be.

``prediction_server`` takes requests, ``memory_estimator`` runs the step of a spec and answers with bytes by purpose;
``operator_counter`` records what lives and what is called, ``arithmetic`` the FLOPs of that; a ``caching_allocator`` is
given what lives; ``gpu_emulation`` lets libraries believe in a GPU.
May import: ``worker.build`` and the nouns.
"""
