"""What launches of different cases share: the GPUs that they ran on, each of which moves all of them. Pure.

The model is a mixed one with a common factor: the logarithm of a launch's step time is its case's mean, plus the GPU's
effect times the case's loading (what runs at the power limit feels a chip's efficiency, what does not hardly), plus
what is its own.
"""
