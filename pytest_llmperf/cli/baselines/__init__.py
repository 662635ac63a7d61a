"""``llmperf baselines``: what is stored, shown and compared."""
