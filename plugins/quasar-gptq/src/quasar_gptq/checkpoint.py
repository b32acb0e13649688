"""Reads layers of checkpoints whose ``quant_method`` is ``gptq``, as AutoGPTQ, GPTQModel and optimum write them.

A layer is stored as ``qweight``, the integers packed along the inputs; ``qzeros``, the zero points packed along the
outputs; ``scales``; and ``g_idx``, the group of each input. The format ``gptq`` stores a zero point less one, modulo
2**bits; ``gptq_v2`` stores it as it is. Integers count from 0, and are moved down by half their number to fit int8.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from quasar.errors import InvalidRequestError, NumericalError
from quasar.options import choice
from quasar.quantizers.options import group_size as whole_or_positive
from quasar.weights.record import QuantizedWeight
from quasar_gptq.packing import WORD, unpack

_BITS = (2, 3, 4, 8)
_FORMATS = ("gptq", "gptq_v2")
_CHANGES_THE_MODEL = ("rotation", "activation")
"""Keys of GPTQModel for models that compute something else around their layers."""


class GptqFormat:
    """See :class:`quasar.protocols.CheckpointFormat`.

    Which layers are quantized is seen from what is stored, so that ``lm_head`` and ``modules_in_block_to_quantize``
    need no attention, and nor does ``sym``.

    Args:
        config: The checkpoint's ``quantization_config``.

    Raises:
        InvalidRequestError: It asks for a variety that is not read; the message says which are.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)
        self._settings = _Settings.of(self._config, "the checkpoint")
        if not isinstance(config.get("dynamic") or {}, Mapping):
            raise InvalidRequestError(f"gptq: 'dynamic' of the checkpoint is {config['dynamic']!r:.60}, not an object")
        self._dynamic = [_Rule.of(pattern, changes) for pattern, changes in (config.get("dynamic") or {}).items()]

    def read(self, name: str, tensors: Mapping[str, Tensor]) -> QuantizedWeight | None:
        """The record of one layer; ``None`` where it has no ``qweight``.

        Raises:
            InvalidRequestError: Tensors are missing or do not fit each other or the configuration.
            NumericalError: A scale is not finite.
        """
        if "qweight" not in tensors:
            return None
        settings = self._settings_of(name)
        parts = _Parts.of(name, tensors, settings)
        groups = parts.groups(settings)
        half = 2 ** (settings.bits - 1)
        integers = unpack(parts.qweight, settings.bits)[: len(groups)]
        zeros = unpack(parts.qzeros.T, settings.bits)[: parts.scales.shape[1]].to(torch.int16)
        if not settings.exact_zeros:
            zeros = (zeros + 1) % (2 * half)
        values = (integers.to(torch.int16) - half).to(torch.int8).T.contiguous()
        return _record(values, parts.scales.float().T, (zeros - half).float(), groups, settings.bits)

    def _settings_of(self, name: str) -> _Settings:
        """With what the first rule that matches changes, as GPTQModel does it."""
        rule = next((rule for rule in self._dynamic if rule.pattern.match(name)), None)
        if rule is None:
            return self._settings
        if rule.changes is None:
            raise InvalidRequestError(f"{name} is stored quantized, though 'dynamic' of the checkpoint leaves it out")
        return _Settings.of({**self._config, **rule.changes}, name)


@attrs.frozen
class _Settings:
    """What the configuration says of a layer."""

    bits: int
    group_size: int
    desc_act: bool
    exact_zeros: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], who: str) -> _Settings:
        form = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
        if config.get("is_marlin_format"):
            form = "marlin"
        choice(*_FORMATS).check("format", form, who=f"{who}: GPTQ")
        bits: Any = config.get("bits")
        group_size = config.get("group_size", 128)
        choice(*_BITS).check("bits", bits, who=f"{who}: GPTQ")
        whole_or_positive.check("group_size", group_size, who=f"{who}: GPTQ")
        choice("int32").check("pack_dtype", config.get("pack_dtype", "int32"), who=f"{who}: GPTQ")
        for key in _CHANGES_THE_MODEL:
            if config.get(key):
                raise InvalidRequestError(f"{who}: GPTQ with {key}={config[key]!r} is not read; it changes the model")
        return cls(bits, group_size, bool(config.get("desc_act", False)), form == "gptq_v2")


@attrs.frozen
class _Rule:
    """One entry of ``dynamic``: what is different for layers of some names; ``None``: they are not quantized."""

    pattern: re.Pattern[str]
    changes: Mapping[str, Any] | None

    @classmethod
    def of(cls, pattern: str, changes: Mapping[str, Any]) -> _Rule:
        try:
            compiled = re.compile(pattern[2:] if pattern[:2] in ("-:", "+:") else pattern)
        except re.error as error:
            raise InvalidRequestError(f"'dynamic' of the checkpoint has the pattern {pattern!r}: {error}") from error
        return cls(compiled, None if pattern.startswith("-:") else changes)


@attrs.frozen(eq=False)
class _Parts:
    """The tensors of a layer, which fit each other.

    Args:
        qweight: ``[words of inputs, out]`` int32.
        qzeros: ``[groups, words of outputs]`` int32.
        scales: ``[groups, out]``.
        g_idx: ``[in]``.
    """

    name: str
    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor | None

    @classmethod
    def of(cls, name: str, tensors: Mapping[str, Tensor], settings: _Settings) -> _Parts:
        missing = [part for part in ("qzeros", "scales") if part not in tensors]
        if missing:
            raise InvalidRequestError(f"{name} is stored with a qweight but without {' and '.join(missing)}")
        parts = cls(name, tensors["qweight"], tensors["qzeros"], tensors["scales"], tensors.get("g_idx"))
        for part in ("qweight", "qzeros"):
            if (dtype := tensors[part].dtype) != torch.int32:
                raise InvalidRequestError(f"{name}.{part} is {dtype}, expected words of torch.int32")
        out, groups = parts.qweight.shape[1], parts.qzeros.shape[0]
        if parts.scales.shape != (groups, out):
            raise InvalidRequestError(
                f"{name}.scales is {list(parts.scales.shape)}, expected {[groups, out]} from qzeros and qweight"
            )
        parts.check_words("qzeros", parts.qzeros.shape[1], settings.bits, out, "outputs")
        if not torch.isfinite(parts.scales).all():
            raise NumericalError(f"{name}.scales has values that are not finite")
        return parts

    def check_words(self, part: str, words: int, bits: int, count: int, what: str) -> None:
        """Words may hold more integers than there are, but less than 32 more."""
        if not 0 <= words * WORD // bits - count < WORD:
            raise InvalidRequestError(
                f"{self.name}.{part} has {words} words for {count} {what}, expected {-(-count * bits // WORD)} with "
                f"{bits} bits; is 'bits' of the configuration right?"
            )

    def groups(self, settings: _Settings) -> Tensor:
        """The group of each input, ``[in]`` int64.

        Some tools store zeros only where inputs are in order; then, and where nothing is stored, it follows from the
        group size.
        """
        n_groups, g_idx = self.scales.shape[0], self.g_idx
        size = self._inputs(settings) if g_idx is None else g_idx.numel()
        self.check_words("qweight", self.qweight.shape[0], settings.bits, size, "inputs")
        if g_idx is not None and (n_groups == 1 or g_idx.any()):
            if int(g_idx.min()) < 0 or int(g_idx.max()) >= n_groups:
                raise InvalidRequestError(f"{self.name}.g_idx names groups outside 0…{n_groups - 1}")
            return g_idx.long()
        if settings.desc_act and n_groups > 1:
            raise InvalidRequestError(f"{self.name} has no g_idx that orders its inputs, which desc_act=true needs")
        length = size if settings.group_size == -1 else settings.group_size
        if -(-size // length) != n_groups:
            raise InvalidRequestError(
                f"{self.name} has {n_groups} groups, expected {-(-size // length)} of {length} for {size} inputs; is "
                "'group_size' of the configuration right?"
            )
        return torch.arange(size, device=self.qweight.device) // length

    def _inputs(self, settings: _Settings) -> int:
        """How many inputs there are, where words may hold some more: whole groups if that is possible."""
        room, whole = self.qweight.shape[0] * WORD // settings.bits, self.scales.shape[0] * settings.group_size
        return whole if 0 <= room - whole < WORD else room


def _record(values: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor, bits: int) -> QuantizedWeight:
    """Bring groups into the order of the record, and to one length: the largest that divides all of theirs.

    Args:
        values: ``[out, in]`` int8.
        scales, zeros: ``[out, groups]`` float32.
        groups: ``[in]`` int64.
    """
    order = groups.argsort(stable=True)
    counts = groups.bincount(minlength=scales.shape[1])
    pieces = counts // math.gcd(*counts.tolist())
    scales, zeros = (tensor.repeat_interleave(pieces, dim=1).contiguous() for tensor in (scales, zeros))
    in_order = bool((order.diff() == 1).all())
    return QuantizedWeight(
        values if in_order else values[:, order],
        scales,
        zeros if bool(zeros.any()) else None,
        bits=bits,
        input_order=None if in_order else order,
    )
