"""``llmperf nights``: which nights were merged, which wait or run, and which nobody will hear of."""
