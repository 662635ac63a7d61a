"""What the plain form of an optimizer makes of given gradients, in double precision: what an update is held against."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from transformers.optimization import Adafactor

# As transformers' arguments have them where nobody says otherwise; told here, since a fault may be in those.
_ADAM: Mapping[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}

# One tensor at a time, as on a CPU: what a GPU chooses by itself is a faster form, and none to hold others against.
_PLAIN: Mapping[str, Any] = {"foreach": False}

_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw_torch": lambda groups, lr: torch.optim.AdamW(groups, lr=lr, **_ADAM, **_PLAIN),
    "sgd": lambda groups, lr: torch.optim.SGD(groups, lr=lr, **_PLAIN),
    "adagrad": lambda groups, lr: torch.optim.Adagrad(groups, lr=lr, **_PLAIN),
    "rmsprop": lambda groups, lr: torch.optim.RMSprop(groups, lr=lr, **_PLAIN),
    "adafactor": lambda groups, lr: Adafactor(groups, lr=lr, scale_parameter=False, relative_step=False),
}


def plain_updates(  # noqa: PLR0913, PLR0917 - an optimizer's settings and what it is given
    optimizer: str,
    weights: Sequence[Mapping[str, torch.Tensor]],
    gradients: Sequence[Mapping[str, torch.Tensor]],
    decaying: Collection[str],
    learning_rate: float,
    weight_decay: float,
) -> list[dict[str, torch.Tensor]]:
    """The update of each step: its ``weights`` as they were before it, and its ``gradients`` as the optimizer has them.

    Weights of the names ``decaying`` decay. A weight without a gradient stays.
    """
    own = {name: torch.nn.Parameter(values.clone()) for name, values in weights[0].items()}
    groups = [
        {"params": [own[name] for name in own if name in decaying], "weight_decay": weight_decay},
        {"params": [own[name] for name in own if name not in decaying], "weight_decay": 0.0},
    ]
    plain = _OPTIMIZERS[optimizer]([group for group in groups if group["params"]], learning_rate)
    updates = []
    for before, given in zip(weights, gradients, strict=True):
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(before[name])
        for name, parameter in own.items():
            parameter.grad = given[name].clone() if name in given else None
        plain.step()
        updates.append({name: parameter.detach() - before[name] for name, parameter in own.items()})
    return updates
