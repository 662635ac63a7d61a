"""``llmperf history``: what a case took, run by run, and where that changed."""
