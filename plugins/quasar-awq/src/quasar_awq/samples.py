"""Samples of what enters linear layers: some rows of it, so that memory does not grow with the calibration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quasar.errors import NumericalError
from quasar.progress import track
from quasar.weights.layers import Layer

_LOGITS = 32
"""Positions of each prompt at which logits are computed where the output head's inputs are sampled."""
_LEAST = 2**26
"""Bytes of samples that may always be held; beyond, as many as the largest layer has in float32."""


class Reservoir:
    """A uniform sample of at most ``size`` of the rows that were added, the same in every run.

    Each row draws a number; those with the largest numbers stay.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._generator = torch.Generator().manual_seed(0)
        self._numbers = torch.empty(0, dtype=torch.float32, device="cpu")
        self.rows: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """``[..., in]``, in the dtype in which they are kept."""
        rows = rows.detach().flatten(0, -2)
        numbers = torch.cat(
            [self._numbers, torch.rand(rows.shape[0], dtype=torch.float32, device="cpu", generator=self._generator)]
        )
        kept = numbers.topk(min(self._size, numbers.shape[0])).indices
        together = rows if self.rows is None else torch.cat([self.rows, rows])
        self.rows, self._numbers = together[kept.to(rows.device)], numbers[kept]


def sample_in_turns(
    model: nn.Module, layers: Sequence[Layer], calibration: Sequence[Tensor], size: int
) -> Iterator[tuple[Layer, Tensor | None]]:
    """Each layer with a sample of its inputs, ``None`` if no row reaches it; see :func:`sample_inputs`.

    The model runs once for as many layers as memory for one more layer holds samples of.
    """
    for turn in _turns(layers, size):
        samples = sample_inputs(model, {layer.name: layer.module for layer in turn}, calibration, size)
        for layer in turn:
            yield layer, samples.pop(layer.name, None)


def _turns(layers: Sequence[Layer], size: int) -> Iterator[list[Layer]]:
    room = max([_LEAST, *(4 * layer.weight.numel() for layer in layers)])
    turn: list[Layer] = []
    taken = 0
    for layer in layers:
        needed = size * layer.weight.shape[1] * layer.weight.element_size()
        if turn and taken + needed > room:
            yield turn
            turn, taken = [], 0
        turn.append(layer)
        taken += needed
    if turn:
        yield turn


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
