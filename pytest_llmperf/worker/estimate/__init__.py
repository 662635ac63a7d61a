"""A process of its own: one training step on tensors without storage, as on a GPU, for what its memory will be.

``memory_estimator`` is run with a spec and answers with bytes by purpose; ``storage_counter`` records what lives,
``replay`` gives it to a ``caching_allocator``, ``gpu_emulation`` lets libraries believe in a GPU, ``fake_sharding`` in
other ranks; ``known_outputs`` spares the step what its first layer has found.
May import: ``worker.build`` and the nouns.
"""
