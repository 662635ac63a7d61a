"""``llmperf plan``: the memory that specs will need."""
