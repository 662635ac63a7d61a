"""What traces mean: of which part of a step a kernel is, and of what the difference between two steps consists.

May import: what ``insight`` may.
"""
