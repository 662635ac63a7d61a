"""What the slides of lab 10 say of training OPT 1.3B on a text: pretrained, a tenth of WikiText-2, padding in the loss.

On H100 64 GB of MareNostrum 5; 450 steps; rates are of all GPUs together, and slots: padding counts.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "lab 10, MareNostrum 5 (H100 64 GB): OPT 1.3B, pretrained, 10 % of WikiText-2, padding in the loss"


@dataclass(frozen=True)
class Run:
    """One row of its table."""

    name: str
    gpus: int
    micro_batch_size: int
    tokens_per_second: float
    seconds: float
    final_loss: float


RUNS = (
    Run("naive", 1, 5, 15_600.0, 117.0, 0.4174),
    Run("optimised", 1, 16, 58_390.0, 126.0, 0.3455),
    Run("optimised", 32, 16, 1_500_000.0, 156.0, 0.1242),
)
