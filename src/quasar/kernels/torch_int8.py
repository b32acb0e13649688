"""W8A8 on x86 CPUs through the int8 matrix product of FBGEMM, which comes with torch.

FBGEMM quantizes activations with one scale for the whole call; used directly (torch's dynamic quantization), a row
then depends on its neighbours. Here each row is divided by a scale of its own and rounded first, the call's scale is
1, and the row's scale is applied to its result. The products are integers added up in int32, so the result is exact
(up to 2**24, beyond which float32 rounds it) and the same for every width.

CPUs without VNNI add pairs of products in 16 bits, which saturate with 8-bit activations. There a value a is fed as
two rows of 7 bits, ``a = 2·hi + lo``: the same integers come out at twice the rows.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from quasar.weights.activations import quantize_rows, quantize_with
from quasar.weights.record import QuantizedWeight


class TorchInt8Kernel:
    """Executes symmetric weights with one scale a row, and int8 activations per token or with a fixed scale.

    Args:
        split: Feed activations as two 7-bit rows; ``None`` decides by trying what this CPU does.
    """

    speed = 10

    def __init__(self, split: bool | None = None) -> None:
        self._split = split

    def refuses(self, weight: QuantizedWeight) -> str | None:
        if weight.values.device.type != "cpu":
            return f"runs on the CPU, the weight is on {weight.values.device}"
        if weight.activations not in ("int8_per_token", "int8_static"):
            return "needs int8 activations, rounded per token or with a fixed scale"
        if weight.group_size != weight.shape[1] or weight.zero_points is not None or weight.input_order is not None:
            return "needs one symmetric scale an output channel, and inputs in their order"
        return _why_unavailable()

    def prepare(self, weight: QuantizedWeight) -> TorchInt8Executor:
        split = needs_split() if self._split is None else self._split
        return TorchInt8Executor(weight, split)


class TorchInt8Executor:
    """One weight in FBGEMM's packed layout; the integers are kept only there."""

    def __init__(self, weight: QuantizedWeight, split: bool) -> None:
        scales = weight.scales[:, 0]
        self._packed = _pack(weight.values, torch.ones_like(scales) if split else scales)
        self._scales_after = scales.clone() if split else None
        self._bits, self._activations, self._input_scale = weight.bits, weight.activations, weight.input_scale

    @property
    def weight(self) -> QuantizedWeight:
        """The weight, unpacked anew at each access."""
        with _deprecation_ignored():
            unpacked = torch.ops.quantized.linear_unpack(self._packed)[0]
        scales = unpacked.q_per_channel_scales().float() if self._scales_after is None else self._scales_after
        return QuantizedWeight(
            unpacked.int_repr(),
            scales.unsqueeze(1),
            bits=self._bits,
            activations=self._activations,
            input_scale=self._input_scale,
        )

    def __call__(self, inputs: Tensor) -> Tensor:
        if inputs.dim() == 1:  # FBGEMM wants rows
            return self(inputs.unsqueeze(0)).squeeze(0)
        integers, row_scales = self._quantize(inputs.to(torch.float32))
        if self._scales_after is None:
            products = _products(integers, 128, self._packed)
        else:
            products = _split_products(integers, self._packed).mul_(self._scales_after)
        return products.mul_(row_scales).to(inputs.dtype)

    def _quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        if self._input_scale is None:
            return quantize_rows(rows)
        return quantize_with(self._input_scale, rows), self._input_scale


def _products(integers: Tensor, zero_point: int, packed: torch.ScriptObject) -> Tensor:
    """``(integers @ values.T) * scales`` as float32, for integers in ``-zero_point … 255 - zero_point``."""
    product: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        integers, 1.0, zero_point, packed
    )
    return product


def _split_products(integers: Tensor, packed: torch.ScriptObject) -> Tensor:
    high = (integers * 0.5).floor_()
    low = integers - 2 * high
    # Offset by 64: high lies in −64…63 and low in 0…1, so both fit in 7 unsigned bits.
    both = _products(torch.stack((high, low)), 64, packed)
    return both[0].mul_(2).add_(both[1])


def _pack(values: Tensor, scales: Tensor) -> torch.ScriptObject:
    zeros = torch.zeros(len(values), dtype=torch.int64, device=values.device)
    with _deprecation_ignored():
        quantized = torch._make_per_channel_quantized_tensor(values.contiguous(), scales.double(), zeros, 0)
        packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantized, None)
    return packed


@contextlib.contextmanager
def _deprecation_ignored() -> Iterator[None]:
    # torch deprecates its quantized tensor type, but so far offers no other way to pack for this product.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@functools.cache
def _why_unavailable() -> str | None:
    try:
        exact = _is_exact(split=needs_split())
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"this torch has no int8 product for this CPU ({str(error).splitlines()[0]})"
    return None if exact else "this CPU's int8 product is not exact"


@functools.cache
def needs_split() -> bool:
    """Whether 8-bit activations overflow on this CPU: found by multiplying the largest values there are."""
    return not _is_exact(split=False)


def _is_exact(split: bool) -> bool:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (32, 192), dtype=torch.int8, device="cpu", generator=generator)
    integers = torch.randint(-127, 128, (5, 192), device="cpu", generator=generator).float()
    values[0], integers[0] = 127, 127
    packed = _pack(values, torch.ones(len(values), dtype=torch.float32, device="cpu"))
    products = _split_products(integers, packed) if split else _products(integers, 128, packed)
    return torch.equal(products.double(), integers.double() @ values.double().T)
