"""What several quantizers are given, and whether it fits the model: asked before a weight is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from quasar.errors import InvalidRequestError
from quasar.options import Expectation, choice, is_integer
from quasar.verifiers.context import declared_length
from quasar.weights.layers import Layer
from quasar.weights.record import ActivationScheme

ACTIVATIONS: tuple[ActivationScheme, ...] = ("none", "int8_per_token", "int8_per_group")
"""Roundings of inputs that need no calibration."""

_USUAL = (16, 32, 64, 128, 256)


activations = choice(*ACTIVATIONS)
"""What ``activations`` of a quantizer must be, where nothing is known of the inputs."""

group_size = Expectation(
    "a positive integer, or -1 for a whole row", lambda value: is_integer(value) and (value >= 1 or value == -1)
)
"""What ``group`` of a quantizer must be."""


def check_group(who: str, layer: Layer, group: int, *, axis: int = 1) -> None:
    """Raise :class:`InvalidRequestError` where ``group`` does not divide the layer's inputs.

    The message names the layer, its shape, the group and the sizes that would do.

    Args:
        who: Name of the quantizer.
        group: Weights that share a scale; −1: all, which fits any layer.
        axis: 1: groups are pieces of a row, so of the inputs; 0: of a column, so of the outputs.
    """
    length, what = layer.weight.shape[axis], ("outputs", "inputs")[axis]
    if group == -1 or length % group == 0:
        return
    choices = [size for size in _USUAL if length % size == 0] or [size for size in (8, 4, 2) if length % size == 0]
    raise InvalidRequestError(
        f"{who}: group={group} does not divide the {length} {what} of layer {layer.name}, "
        f"shape {list(layer.weight.shape)}; choose {', '.join(map(str, [*choices, -1]))}, "
        f"or leave the layer out with exclude={layer.name}"
    )


def checked_prompts(who: str, model: Any, calibration: Sequence[Tensor] | None) -> Sequence[Tensor]:
    """The calibration prompts, maybe none, each of which the model can take.

    Args:
        who: Name of the quantizer.

    Raises:
        InvalidRequestError: One is not ``[1, T]``, or is longer than the model's context.
    """
    config = getattr(model, "config", None)  # a plain module has none
    limit = None if config is None else declared_length(config.get_text_config())
    prompts = () if calibration is None else calibration
    for i, prompt in enumerate(prompts):
        shape = list(getattr(prompt, "shape", ()))
        if len(shape) != 2 or shape[0] != 1:
            got = f"of shape {shape}" if shape else f"a {type(prompt).__name__}"
            raise InvalidRequestError(f"{who}: calibration prompt {i} is {got}, expected a tensor [1, T] of token ids")
        if limit is not None and shape[1] > limit:
            raise InvalidRequestError(
                f"{who}: calibration prompt {i} has {shape[1]} tokens, but the model's context is {limit}; "
                f"cut it to {limit}"
            )
    return prompts
