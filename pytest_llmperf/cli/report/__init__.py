"""``llmperf report``: the chapter's tables of what is stored, and which case serves a purpose best."""
