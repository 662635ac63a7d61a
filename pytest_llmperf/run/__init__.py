"""A run, from what it was asked for to its files, and each of its cases, from its spec to its conclusion.

``run`` is what every front-end drives, ``settings`` what it was asked for, ``cases`` what a test may ask of it. May
import: ``launch``, ``judge``, ``analysis``, ``report`` and what is below them."""
