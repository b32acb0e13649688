"""Samples of what enters linear layers: some rows of it, so that memory does not grow with the calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quasar.errors import NumericalError
from quasar.progress import track

_LOGITS = 32
"""Positions of each prompt at which logits are computed where the output head's inputs are sampled."""


class Reservoir:
    """A uniform sample of at most ``size`` of the rows that were added, the same in every run.

    Each row draws a number; those with the largest numbers stay.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._generator = torch.Generator().manual_seed(0)
        self._numbers = torch.empty(0)
        self.rows: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """``[..., in]``, in the dtype in which they are kept."""
        rows = rows.detach().flatten(0, -2)
        numbers = torch.cat([self._numbers, torch.rand(rows.shape[0], generator=self._generator)])
        kept = numbers.topk(min(self._size, numbers.shape[0])).indices
        together = rows if self.rows is None else torch.cat([self.rows, rows])
        self.rows, self._numbers = together[kept.to(rows.device)], numbers[kept]


@torch.no_grad()
def sample_inputs(
    model: nn.Module, modules: Mapping[str, nn.Module], calibration: Sequence[Tensor], size: int
) -> dict[str, Tensor]:
    """Run the model on the calibration prompts; returns ``[n ≤ size, in]`` rows by the names of ``modules``.

    Args:
        model: The full model; not mutated.
        modules: Linear layers. One that no row reaches, as an expert that no token chose, is not in the result.
        calibration: ``[1, T]`` integer token ids each.

    Raises:
        NumericalError: An input is not finite; the message names the layer.
    """
    reservoirs = {name: Reservoir(size) for name in modules}
    hooks = [module.register_forward_pre_hook(_adder(reservoirs[name])) for name, module in modules.items()]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    positions = _LOGITS if any(module is head for module in modules.values()) else 1
    try:
        for token_ids in track(calibration, "sampling activations"):
            model(input_ids=token_ids, use_cache=False, logits_to_keep=positions)
    finally:
        for hook in hooks:
            hook.remove()
    samples = {name: reservoir.rows for name, reservoir in reservoirs.items() if reservoir.rows is not None}
    for name, rows in samples.items():
        if not torch.isfinite(rows).all():
            raise NumericalError(f"what enters {name} is not finite on the calibration prompts; it cannot be quantized")
    return {name: rows for name, rows in samples.items() if len(rows)}


def _adder(reservoir: Reservoir) -> Any:
    return lambda _module, arguments: reservoir.add(arguments[0])
