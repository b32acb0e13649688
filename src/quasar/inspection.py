"""What a quantizer makes of a model: layer by layer, and in bytes."""

from __future__ import annotations

from typing import Any

import attrs
from torch import nn

from quasar.models import load_model
from quasar.plan import Plan
from quasar.quantizers.linear import QuantizedLinear
from quasar.sensitivity import measure_sensitivity


def inspect_model(
    name: str, *, dtype: str | None = None, device: str | None = None, sensitivity: bool = False, **choices: Any
) -> dict[str, Any]:
    """Load a model and quantize it; returns what ``quasar inspect --json`` prints.

    Args:
        name: As for :func:`quasar.models.load_model`.
        sensitivity: Measure too what each layer's rounding does to the model: one forward a layer.
        choices: ``quantizer`` and ``calibration``; see :class:`quasar.plan.Plan`.

    Returns:
        ``quantizer``: its options; ``layers`` and ``skipped``: as it describes them, maybe empty; ``full_bytes`` and
        ``quantized_bytes``: of all tensors of the model and of its copy, a tensor that is used twice counted once.
        ``sensitivity``, if it was asked for: a :class:`quasar.sensitivity.SensitivityReport` as a dictionary.
    """
    plan = Plan.of(choices)  # type: ignore[arg-type]
    loaded = load_model(name, dtype=dtype, device=device)
    calibration, measured = plan.calibration_for(loaded.model, loaded.tokenizer), {}
    if sensitivity and plan.quantizes:
        quantized, report = measure_sensitivity(loaded.model, plan.quantizer, calibration)
        measured["sensitivity"] = attrs.asdict(report)
    else:
        quantized = plan.quantizer.quantize(loaded.model, calibration)
    description = dict(plan.quantizer.describe())
    layers, skipped = description.pop("layers", []), description.pop("skipped", [])
    return {
        "quantizer": description,
        "layers": layers,
        "skipped": skipped,
        "full_bytes": tensor_bytes(loaded.model),
        "quantized_bytes": tensor_bytes(quantized),
        **measured,
    }


def tensor_bytes(model: nn.Module) -> int:
    """Bytes of all weights and buffers, shared ones once. Of a quantized layer: of its record."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }
    records = {id(module): module for module in model.modules() if isinstance(module, QuantizedLinear)}
    return sum(storages.values()) + sum(module.executor.weight.nbytes for module in records.values())
