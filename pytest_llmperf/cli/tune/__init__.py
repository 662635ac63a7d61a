"""``llmperf tune``: the fastest configuration of a model that fits, searched and shown."""
