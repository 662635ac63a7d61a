"""A process of its own: one training step on tensors without storage, as on a GPU, for what its memory will be."""
