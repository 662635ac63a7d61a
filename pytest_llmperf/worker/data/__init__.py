"""What a launch trains on: random tokens, or a text that is read, made tokens and cut into rows before all timing.

``datasets`` is imported for a text alone, and what it reads are local files: nothing here asks a network for anything.
"""
