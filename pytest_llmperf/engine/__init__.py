"""One case from its spec to its conclusion: launched until it is decided, judged, recorded.

``baseline_comparison`` holds a spec against what is stored, ``paired_comparison`` against another in turns,
``max_batch_size`` looks for the largest micro-batch; ``runner`` launches for all. May import: ``run`` and below.
"""
