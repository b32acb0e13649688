"""Kernels execute quantized weights; this picks the one for a weight."""

from __future__ import annotations

from quasar.errors import InvalidRequestError
from quasar.protocols import Kernel
from quasar.registry.registry import default_registry
from quasar.weights.record import QuantizedWeight


class KernelChooser:
    """Gives each weight to the fastest kernel that can execute it.

    Args:
        name: ``"auto"``, or the name of the one kernel to use.

    Raises:
        UnknownStrategyError: No kernel has that name.
    """

    def __init__(self, name: str = "auto") -> None:
        registry = default_registry()
        names = [entry.name for entry in registry.entries("kernel")] if name == "auto" else [name]
        kernels = [(name, registry.build("kernel", name)) for name in names]
        self._kernels: list[tuple[str, Kernel]] = sorted(kernels, key=lambda named: -named[1].speed)

    def choose(self, weight: QuantizedWeight) -> tuple[str, Kernel]:
        """The name of the kernel and the kernel.

        Raises:
            InvalidRequestError: Each kernel refuses; the message has all their reasons.
        """
        reasons = []
        for name, kernel in self._kernels:
            reason = kernel.refuses(weight)
            if reason is None:
                return name, kernel
            reasons.append(f"{name}: {reason}")
        raise InvalidRequestError(f"no kernel executes a weight of shape {list(weight.shape)}: {'; '.join(reasons)}")
