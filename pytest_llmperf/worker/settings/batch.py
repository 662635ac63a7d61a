"""Batch: its sizes are the Trainer's own arguments; tokens are counted in the batches that a rank is given."""

from pytest_llmperf.worker.settings.twin import Twin

TWIN = Twin(
    name="batch",
    arguments=lambda spec, _: {
        "per_device_train_batch_size": spec.micro_batch_size,
        "gradient_accumulation_steps": spec.gradient_accumulation_steps,
    },
)
