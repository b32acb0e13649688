"""The inputs of layers, observed block by block in a model whose earlier blocks are quantized already."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from itertools import groupby
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from quasar.errors import NumericalError
from quasar.weights.layers import Layer
from quasar_gptq.lockstep import Call, lanes, run


@attrs.frozen(eq=False)
class Block:
    """Layers that are observed together, and quantized before anything that follows them is.

    Args:
        name: Of the module that they are in.
        layers: In the order of the modules.
    """

    name: str
    layers: list[Layer]


def blocks_of(model: nn.Module, layers: Sequence[Layer]) -> list[Block]:
    """All layers by their blocks, in the order of the modules.

    A block is an item of the outermost ``ModuleList`` above a layer, whatever its name is; a layer under none, such as
    the output head, is a block of its own.
    """
    return [Block(name, list(group)) for name, group in groupby(layers, key=lambda layer: _block_of(model, layer.name))]


def _block_of(model: nn.Module, name: str) -> str:
    parts = name.split(".")
    for i in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:i])), nn.ModuleList):
            return ".".join(parts[: i + 1])
    return name


def observe_in_turn(
    model: nn.Module, blocks: Sequence[Block], calibration: Sequence[Tensor]
) -> Generator[tuple[Block, dict[str, Tensor]], None, None]:
    """Each block with what is known of its inputs, when all prompts stand before it.

    The caller replaces the layers before it asks for the next block: the prompts pass through what then stands there.
    Blocks come in the order in which the model calls them, and at last those that it did not call.

    Args:
        model: The copy in which layers are replaced.
        calibration: ``[1, T]`` integer token ids each.

    Returns:
        The block, and by the names of its layers ``XᵀX``, ``[in, in]`` float32; none for a layer that no input reached.

    Raises:
        NumericalError: Inputs of a layer are not finite.
    """
    pending = {block.name: block for block in blocks}
    with lanes(model, pending, calibration) as prompts:
        while pending and (waiting := [(lane, lane.call) for lane in prompts if lane.call is not None]):
            name = waiting[0][1].block
            calls = [(lane, call) for lane, call in waiting if call.block == name]
            if block := pending.pop(name, None):
                yield block, _hessians(model, block, [call for _, call in calls])
            for lane, call in calls:
                lane.answer(run(model, call))
    for block in pending.values():
        yield block, {}


def _hessians(model: nn.Module, block: Block, calls: Sequence[Call]) -> dict[str, Tensor]:
    products = _Products()
    modules = {layer.name: model.get_submodule(layer.name) for layer in block.layers}
    if block.name in modules:  # a layer by itself, which is not called again
        for call in calls:
            products.add(block.name, call.args, call.kwargs)
    else:
        hooks = [
            module.register_forward_pre_hook(products.hook_for(name), with_kwargs=True)
            for name, module in modules.items()
        ]
        try:
            for call in calls:
                run(model, call)
        finally:
            for hook in hooks:
                hook.remove()
    for name, hessian in products.hessians.items():
        if not torch.isfinite(hessian).all():
            raise NumericalError(f"{name}: its inputs for the calibration prompts are not finite, or too large")
    return products.hessians


class _Products:
    """Sums of ``XᵀX``, layer by layer. Layers that consume one tensor one after the other share a product."""

    def __init__(self) -> None:
        self.hessians: dict[str, Tensor] = {}
        self._latest: tuple[Tensor, Tensor] | None = None

    def hook_for(self, name: str) -> Any:
        return lambda _module, args, kwargs: self.add(name, args, kwargs)

    def add(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take in what a layer is called with: ``[..., in]`` inputs."""
        inputs, *_ = (*args, *kwargs.values())
        if self._latest is None or self._latest[0] is not inputs:
            rows = inputs.detach().flatten(0, -2).float()
            self._latest = (inputs, rows.T @ rows)
        product = self._latest[1]
        self.hessians[name] = self.hessians[name].add_(product) if name in self.hessians else product.clone()
