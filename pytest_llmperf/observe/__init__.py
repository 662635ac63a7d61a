"""What a rank observes of a training, whoever wrote it: clocks, memory, its GPU.

``device`` alone names CUDA. It imports torch, knows neither the Trainer nor the worker, and may import ``records``,
``spec`` and ``support``.
"""
