"""Texts for tools that read results and are not ours: a file for each. Pure."""
