"""A user's own training, watched from outside: hooks that a private folder on PYTHONPATH brings into its processes."""
