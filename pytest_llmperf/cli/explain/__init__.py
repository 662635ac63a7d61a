"""``llmperf explain``: what a traced step consists of, and what the difference between two does."""
