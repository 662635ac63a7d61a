"""First on the path of a script that compiles nothing: half of what torch and its optimizers import is left out.

For what becomes of processes, and how they are watched: most of a small script's time would be its imports.
"""

from __future__ import annotations

import os

from left_out import leave_out  # type: ignore[import-not-found]

leave_out(
    f"torch.{name}" for name in "_dynamo _export _inductor _lobpcg ao distributions export onnx quantization".split()
)
if "SHARDS" not in os.environ:
    leave_out(["torch.distributed.fsdp", "torch.distributed.tensor"], with_classes=True)
