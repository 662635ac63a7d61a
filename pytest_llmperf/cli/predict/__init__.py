"""``llmperf predict``: throughput at numbers of GPUs that were not measured."""
