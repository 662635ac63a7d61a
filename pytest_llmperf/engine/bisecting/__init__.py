"""One search for the revision or version with which a training changed."""
