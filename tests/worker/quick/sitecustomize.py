"""First on the path of a script that compiles nothing: it leaves out more than half of what torch imports.

For what becomes of processes, and how they are watched: most of a small script's time would be its imports.
"""

from __future__ import annotations

import os

from left_out import leave_out  # type: ignore[import-not-found]

_UNUSED = "_dynamo _export _inductor _lobpcg ao distributions export onnx quantization"
# Who says SHARDS shards, or makes a Generator, as workers of a DataLoader do. Of some classes torch asks for instances.
_OF_SHARDS = (
    "_decomp _functorch _higher_order_ops _meta_registrations _native _precompile _prims _prims_common _refs "
    "compiler.precompile fft func hub linalg masked nn.attention nn.intrinsic nn.qat nn.quantizable nn.quantized "
    "package special testing"
)
_CLASSES_OF_SHARDS = "_subclasses distributed.fsdp distributed.tensor fx.experimental.proxy_tensor"

leave_out(f"torch.{name}" for name in _UNUSED.split())
if "SHARDS" not in os.environ:
    leave_out((f"torch.{name}" for name in _OF_SHARDS.split()), importing=["torch._subclasses.fake_tensor"])
    leave_out((f"torch.{name}" for name in _CLASSES_OF_SHARDS.split()), with_classes=True)
    # Asked for under autocast, where a mode sees functions; torch has the rest by then.
    leave_out(["torch.signal"], importing=["torch.fx.experimental.proxy_tensor"])
