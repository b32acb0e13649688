"""The one module that holds a quantized weight."""

from __future__ import annotations

from torch import Tensor, nn

from quasar.protocols import Executor


class QuantizedLinear(nn.Module):
    """A linear layer that a kernel executes.

    Args:
        executor: From a kernel's ``prepare``.
        bias: ``[out]`` or ``None``; kept in the dtype it has.
        kernel: Its name, for reports.
    """

    def __init__(self, executor: Executor, bias: Tensor | None, kernel: str = "") -> None:
        super().__init__()
        self.executor, self.kernel = executor, kernel
        weight = executor.weight  # may be unpacked anew at each access
        self.out_features, self.in_features = weight.shape
        self.bits, self.activations = weight.bits, weight.activations
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``, same dtype."""
        outputs = self.executor(inputs)
        return outputs if self.bias is None else outputs + self.bias

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"bits={self.bits}, activations={self.activations}, executor={type(self.executor).__name__}"
        )


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """All quantized layers by name, each once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
