"""What backward passes of a user's own training begin from: losses, kept on their device until they are asked for."""

from __future__ import annotations

from typing import Any

import torch

# Backward passes of which losses are kept: those of the timed steps, unless a step has a hundred and more.
_MOST = 4096


class Losses:
    """Places made at the start, so that what is kept is no growth of the training's."""

    def __init__(self, device: torch.device) -> None:
        self._places = list(torch.zeros(_MOST, 1, device=device))
        self._number = 0
        self.are_known = True
        """Whether each pass began from one number, and all of them have a place."""

    def keep(self, loss: torch.Tensor | None) -> torch.Tensor:
        """Return where ``loss`` is kept; ``None``: a pass did not begin from one number."""
        self.are_known = self.are_known and loss is not None and self._number < _MOST
        if loss is None or not self.are_known:
            return self._places[0]
        place = self._places[self._number]
        self._number += 1
        return place.copy_(loss.reshape(1))


def loss_of(roots: Any) -> torch.Tensor | None:
    """What a pass that begins from ``roots`` begins from, where that is one number."""
    if not isinstance(roots, torch.Tensor):
        found = list(roots)
        if len(found) != 1 or not isinstance(found[0], torch.Tensor):
            return None
        roots = found[0]
    if hasattr(roots, "to_local"):  # of ranks that hold one tensor together
        if not all(each.is_replicate() for each in roots.placements):
            return None
        roots = roots.detach().to_local()
    return roots if roots.numel() == 1 else None


def device_of(tensors: Any) -> torch.device:
    """Of the first of ``tensors``, one or several."""
    found = (one for one in ([tensors] if isinstance(tensors, torch.Tensor) else tensors))
    return next((one.device for one in found if isinstance(one, torch.Tensor)), torch.device("cpu"))
