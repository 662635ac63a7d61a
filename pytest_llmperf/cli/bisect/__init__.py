"""``llmperf bisect``."""
