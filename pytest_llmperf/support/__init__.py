"""What any room may use, and what knows none of them: files written whole, what people type and read, records as files.

May import: nothing of this package. The build reads the version here."""

__version__ = "0.1.0"
MADE_BY = f"pytest-llmperf {__version__}"
"""Of what this package has written, for people."""
