"""What a ``quantization_config`` says of each layer; what Quasar has no way to compute is refused here, by name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from enum import Enum
from typing import Any

import attrs
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.utils.match import is_match, match_targets
from pydantic import ValidationError
from torch import nn

from quasar.errors import InvalidRequestError
from quasar.weights.record import ActivationScheme

_FORMATS = ("int-quantized", "naive-quantized", "pack-quantized", "dense")
_STRATEGIES = ("tensor", "channel", "group")
_INSTEAD = "quantize with the scheme W8A8 or W4A16 of llm-compressor, or give the full model and a quantizer of Quasar"


@attrs.frozen
class Scheme:
    """How the layers of one config group are stored and computed.

    Args:
        group: Name of the config group.
        format: One of int-quantized, naive-quantized, pack-quantized, dense.
        weights: Integers of at most 8 bits, per tensor, channel or group.
        activations: In the words of :class:`quasar.weights.record.QuantizedWeight`.
        ordered: The columns of a group lie apart, and ``weight_g_idx`` says which group each belongs to.
    """

    group: str
    format: str
    weights: QuantizationArgs
    activations: ActivationScheme
    ordered: bool


class Schemes:
    """The schemes of a checkpoint and the layers that each is for; matched as the library matches them.

    Raises:
        InvalidRequestError: The configuration is broken or not supported.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        _refuse_what_lies_beside_weights(config)
        plain, ordered = _without_group_order(config)
        parsed = _parse(plain)
        self._ignore = parsed.ignore or []
        self._by_target: dict[str, Scheme | None] = {}
        for group, scheme in parsed.config_groups.items():
            checked = _checked(group, scheme, _word(scheme.format or parsed.format), group in ordered)
            self._by_target.update(dict.fromkeys(scheme.targets, checked))
        self._linear = nn.Linear(1, 1, device="meta")  # what a target that is a class is compared with

    def of(self, name: str) -> Scheme | None:
        """The scheme of the linear layer ``name``; ``None``: it is not quantized."""
        if is_match(name, self._linear, self._ignore):
            return None
        targets = match_targets(name, self._linear, self._by_target)
        return self._by_target[targets[0]] if targets else None


def _refuse_what_lies_beside_weights(config: Mapping[str, Any]) -> None:
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise InvalidRequestError(
            f"compressed-tensors: sparsity_config with the format {sparsity!r} is not supported; store the weights "
            "dense, then quantize"
        )
    if config.get("kv_cache_scheme"):
        raise InvalidRequestError(
            "compressed-tensors: kv_cache_scheme: Quasar keeps keys and values in full precision, so the output would "
            "not be this checkpoint's; quantize again without it"
        )
    if (config.get("transform_config") or {}).get("config_groups"):
        raise InvalidRequestError(
            "compressed-tensors: transform_config: transforms of activations are not supported; quantize again without"
        )
    if config.get("moe_sparsity_config"):
        raise InvalidRequestError(
            "compressed-tensors: moe_sparsity_config: pruned experts are not supported; quantize all experts"
        )


def _without_group_order(config: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """The configuration without ``actorder`` by group, and the groups that had it.

    The library has come to refuse it, but there are checkpoints with it, and a record can hold it.
    """
    plain, ordered = copy.deepcopy(dict(config)), set()
    groups = plain.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, dict) and weights.get("actorder") in (True, "group", "dynamic"):
            del weights["actorder"]
            ordered.add(name)
    return plain, ordered


def _parse(config: dict[str, Any]) -> QuantizationConfig:
    try:
        return QuantizationConfig.model_validate(config)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
    except (KeyError, TypeError, ValueError, NotImplementedError) as error:
        faults = " ".join(str(error).split())
    raise InvalidRequestError(f"compressed-tensors: the library cannot read quantization_config: {faults}")


def _checked(group: str, scheme: QuantizationScheme, stored: str, ordered: bool) -> Scheme | None:
    """Our words for a config group; ``None`` where it quantizes nothing."""
    who = f"compressed-tensors: config group {group!r} (targets {', '.join(scheme.targets)})"
    if scheme.weights is None and scheme.input_activations is None and scheme.output_activations is None:
        return None
    fault = _fault_of(scheme, stored)
    if fault is not None or scheme.weights is None:
        raise InvalidRequestError(f"{who}: {fault}; {_INSTEAD}")
    activations = _activations(scheme.input_activations)
    if activations is None:
        raise InvalidRequestError(
            f"{who}: input_activations are {_described(scheme.input_activations)}; supported are int8 symmetric, "
            f"dynamic per token or static per tensor; {_INSTEAD}"
        )
    return Scheme(group, stored, scheme.weights, activations, ordered)


def _fault_of(scheme: QuantizationScheme, stored: str) -> str | None:
    weights = scheme.weights
    if "Embedding" in scheme.targets:
        return "embeddings cannot be quantized"
    if weights is None:
        return "activations are quantized and no weights"
    if scheme.output_activations is not None:
        return "output_activations cannot be quantized"
    if stored not in _FORMATS:
        return f"the format {stored!r} is not one of {', '.join(_FORMATS)}"
    integers = _word(weights.type) == "int" and 1 <= weights.num_bits <= 8
    if not integers or _word(weights.strategy) not in _STRATEGIES or weights.dynamic:
        return f"weights are {_described(weights)}; supported are int1 to int8, static per {', '.join(_STRATEGIES)}"
    return None


def _activations(args: QuantizationArgs | None) -> ActivationScheme | None:
    """``None`` where there is no word for it."""
    if args is None:
        return "none"
    if (_word(args.type), args.num_bits, args.symmetric) != ("int", 8, True):
        return None
    known: dict[tuple[str, Any], ActivationScheme] = {
        ("token", True): "int8_per_token",
        ("tensor", False): "int8_static",
    }
    return known.get((_word(args.strategy), _word(args.dynamic)))


def _described(args: QuantizationArgs | None) -> str:
    assert args is not None
    symmetry = "symmetric" if args.symmetric else "asymmetric"
    when = {True: "dynamic", False: "static"}.get(_word(args.dynamic), f"dynamic ({_word(args.dynamic)})")
    return f"{_word(args.type)}{args.num_bits} {symmetry}, {when} per {_word(args.strategy)}"


def _word(value: Any) -> Any:
    """The library keeps words as they came or as enumerations."""
    return value.value if isinstance(value, Enum) else value
