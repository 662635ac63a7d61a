"""Direction: which way a metric gets better, for tools that have to be told; of others nothing is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Better = Literal["bigger", "smaller"]

#: Metrics of which more is better, and of which less is. What neither is true of (a loss, a batch) is in none.
DIRECTIONS: Mapping[Better, frozenset[str]] = {
    "bigger": frozenset(
        {
            "tokens_per_second_per_gpu",
            "tokens_per_second",
            "real_tokens_per_second_per_gpu",
            "mfu",
            "scaling_efficiency",
            "max_micro_batch_size",
            "throughput_ratio",
            "speed_up",
        }
    ),
    "smaller": frozenset(
        {
            "step_seconds",
            "first_step_seconds",
            "start_seconds",
            "imports_seconds",
            "model_seconds",
            "checkpoint_seconds",
            "micro_batch_seconds",
            "stall_share",
            "allocated_growth_bytes",
            "peak_reserved_bytes",
            "peak_allocated_bytes",
            "predicted_peak_bytes",
            "checkpoint_bytes",
            "memory_ratio",
            "communication_share",
            "data_wait_seconds",
            "data_wait_share",
            "joules_per_token",
            "price_per_million_tokens",
            "kernels_per_step",
            "operators_per_step",
            "copies_per_step",
            "synchronisations_per_step",
            "flops_per_step",
            "graph_breaks",
            "allocator_retries",
        }
    ),
}
