"""A few steps after those that are timed, kernel by kernel.

``tracer`` runs the profiler, ``activities`` reads what it saw, ``step_trace`` makes a ``records/trace.py`` of that, or
says why it is not complete. May import: what ``worker`` may.
"""
