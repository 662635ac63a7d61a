"""What any room may use, and what knows none of them: files written whole, quantities read and shown, suggestions.

May import: nothing of this package.
"""
