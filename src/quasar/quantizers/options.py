"""Options that several quantizers have, and whether a model fits them: asked before a weight is touched."""

from __future__ import annotations

from collections.abc import Sequence

from quasar.errors import InvalidRequestError
from quasar.weights.layers import Layer
from quasar.weights.record import ActivationScheme

ACTIVATIONS: tuple[ActivationScheme, ...] = ("none", "int8_per_token", "int8_per_group")
"""Roundings of inputs that need no calibration."""

_USUAL = (16, 32, 64, 128, 256)


def check_bits(who: str, bits: object, choices: Sequence[int]) -> None:
    """Raise :class:`InvalidRequestError` where ``bits`` is none of the integers in ``choices``."""
    if not isinstance(bits, int) or isinstance(bits, bool) or bits not in choices:
        raise InvalidRequestError(f"{who}: bits={bits!r}, expected one of {', '.join(map(str, choices))}")


def check_group_option(who: str, group: object) -> None:
    """Raise :class:`InvalidRequestError` where ``group`` is neither a positive integer nor −1."""
    if isinstance(group, bool) or not isinstance(group, int) or (group < 1 and group != -1):
        raise InvalidRequestError(f"{who}: group={group!r}, expected a positive integer, or -1 for a whole row")


def check_activations(who: str, activations: object) -> None:
    """Raise :class:`InvalidRequestError` where ``activations`` is none of :data:`ACTIVATIONS`."""
    if activations not in ACTIVATIONS:
        raise InvalidRequestError(f"{who}: activations={activations!r}, expected one of {', '.join(ACTIVATIONS)}")


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
