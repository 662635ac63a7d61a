"""What a trace decides: counts that are exact, held against those that a baseline keeps.

May import: what ``judge`` may.
"""
