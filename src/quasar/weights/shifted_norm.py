"""A norm with a bias beside it."""

from __future__ import annotations

from torch import Tensor, nn


class ShiftedNorm(nn.Module):
    """A norm that has no bias of its own, and one that is added to its output.

    Args:
        norm: Called with whatever this module is called with.
        bias: ``[D]``.
    """

    def __init__(self, norm: nn.Module, bias: Tensor) -> None:
        super().__init__()
        self.norm = norm
        self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """What the norm gives, ``[..., D]``, plus the bias; same dtype."""
        outputs: Tensor = self.norm(*args, **kwargs)
        return outputs + self.bias
