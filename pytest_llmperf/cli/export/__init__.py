"""``llmperf export``: results of runs as the texts of other tools."""
