"""The one module that holds a quantized weight."""

from __future__ import annotations

from torch import Tensor, nn

from quasar.protocols import Executor


class QuantizedLinear(nn.Module):
    """A linear layer that a kernel executes.

    Args:
        executor: From a kernel's ``prepare``.
        bias: ``[out]`` or ``None``; kept in the dtype it has.
    """

    def __init__(self, executor: Executor, bias: Tensor | None) -> None:
        super().__init__()
        self.executor = executor
        self.out_features, self.in_features = executor.weight.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, same dtype."""
        outputs = self.executor(inputs)
        return outputs if self.bias is None else outputs + self.bias

    def extra_repr(self) -> str:
        weight = self.executor.weight
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"bits={weight.bits}, activations={weight.activations}, executor={type(self.executor).__name__}"
        )
