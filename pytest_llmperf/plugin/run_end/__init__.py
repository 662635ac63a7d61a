"""The end of a run: what it is told by, written to and failed for."""
