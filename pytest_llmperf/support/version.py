"""The version of this package, which its build reads too."""

__version__ = "0.1.0"
MADE_BY = f"pytest-llmperf {__version__}"
"""Of what this package has written, for people."""
