"""Where in a history a training changed: which candidate to launch next, and what its launches say. Pure."""
