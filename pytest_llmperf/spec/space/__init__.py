"""Spaces of configurations: axes of choices around one spec, and what of them can be."""
