"""The search for the best of many configurations: what to try next, what is known, and which is the best. Pure."""
