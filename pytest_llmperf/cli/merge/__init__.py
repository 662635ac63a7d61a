"""``llmperf merge``: the results of a night as one document and one page, and who is told of it."""
