"""A module for each command: its options, its answer and its pages."""
