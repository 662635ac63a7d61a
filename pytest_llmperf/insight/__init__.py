"""What figures mean: utilisation of the chip, memory, cost, gains, scaling and who holds the others up. Pure.

``chapter15`` has the published tables, ``chip_utilisation`` and ``memory_formulas`` arithmetic, ``scaling_model`` what
more GPUs would bring. May import: ``records``, ``spec``, ``support``.
"""
