"""``llmperf baselines``: what is stored, shown, compared, and two branches' of it united."""
