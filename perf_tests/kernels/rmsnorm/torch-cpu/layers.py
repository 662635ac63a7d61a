"""By PyTorch's own function, which a CPU has too."""

import torch
from torch import nn


class LlamaRMSNorm(nn.Module):
    """Takes the place of transformers' class of this name, whose weights it reads."""

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        of_one = nn.functional.rms_norm(hidden_states.float(), hidden_states.shape[-1:], eps=self.variance_epsilon)
        return self.weight * of_one.to(hidden_states.dtype)
