"""QuickMode: a dispatch mode that is called for each operator of a step, where nothing is compiled."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Asked of each fake tensor that C++ looks at: two of three calls.
DEVICE = torch.ops.prim.device.default


class QuickMode(TorchDispatchMode):
    """Without the wrapper that keeps a compiler out of ``__torch_dispatch__``."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
