"""``llmperf check``: specs held against their baselines as pytest's ``perf.check`` holds them, without pytest."""
