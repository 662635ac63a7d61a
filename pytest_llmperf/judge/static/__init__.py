"""What is judged without a launch: the figures of a step on fake tensors, held against those that a baseline keeps.

May import: what ``judge`` may.
"""
