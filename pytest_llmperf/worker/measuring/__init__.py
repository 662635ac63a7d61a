"""Measuring: the clocks and counters of one rank's timed steps, and when these end.

Nothing here waits, logs or copies while steps are timed. It knows torch and the records, no model and no Trainer.
"""
