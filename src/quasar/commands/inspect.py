"""What a quantizer makes of a model: layer by layer, and in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
from torch import nn

from quasar.checkpoints.models import load_model
from quasar.commands.sensitivity import measure_sensitivity
from quasar.errors import InvalidRequestError
from quasar.loop.checks import quantize
from quasar.pipeline.plan import Plan
from quasar.types import Quantized
from quasar.weights.layers import LayerReport, skipped_weights
from quasar.weights.linear import quantized_layers
from quasar.weights.provenance import quantization_described


def inspect_model(
    name: str, *, dtype: str | None = None, device: str | None = None, sensitivity: bool = False, **choices: Any
) -> dict[str, Any]:
    """Load a model and quantize it; returns what ``quasar inspect --json`` prints.

    Args:
        name: As for :func:`quasar.checkpoints.models.load_model`.
        sensitivity: Measure too what each layer's rounding does to the model: one forward a layer.
        choices: ``quantizer`` and ``calibration``; see :class:`quasar.pipeline.plan.Plan`.

    Returns:
        ``quantizer``: its options; ``layers`` and ``skipped``: as it describes them, maybe empty; ``full_bytes`` and
        ``quantized_bytes``: of all tensors of the model and of its copy, a tensor that is used twice counted once. For
        a model that comes quantized, ``full_bytes`` and the errors of its layers are ``None``. ``sensitivity``, if it
        was asked for: a :class:`quasar.commands.sensitivity.SensitivityReport` as a dictionary.

    Raises:
        InvalidRequestError: ``sensitivity`` without a quantizer.
    """
    plan = Plan.of(choices)  # type: ignore[arg-type]
    loaded = load_model(name, dtype=dtype, device=device)
    plan = plan.fitted_to(loaded.model)
    calibration = plan.calibration_for(loaded.model, loaded.tokenizer)
    if not sensitivity:
        return report_of(loaded.model, quantize(plan.quantizer, loaded.model, calibration))
    if not plan.quantizes:
        raise InvalidRequestError("sensitivity is what quantizing does to a model, and no quantizer is asked for")
    quantized, measured = measure_sensitivity(loaded.model, plan.quantizer, calibration)
    return {**report_of(loaded.model, quantized), "sensitivity": attrs.asdict(measured)}


def report_of(model: nn.Module, made: Quantized) -> dict[str, Any]:
    """What became of ``model``; of one that came quantized, what it is made of, without errors."""
    quantized, description = made.model, dict(made.report)
    layers, skipped = description.pop("layers", []), description.pop("skipped", [])
    if comes_quantized := bool(quantized_layers(model)):
        description = quantization_described(model) or description
        layers = [attrs.asdict(layer) for layer in _found(quantized)]
        skipped = [attrs.asdict(part) for part in skipped_weights(quantized, set(quantized_layers(quantized)), {})]
    return {
        "quantizer": description,
        "layers": layers,
        "skipped": skipped,
        "full_bytes": None if comes_quantized else tensor_bytes(model),
        "quantized_bytes": tensor_bytes(quantized),
    }


def _found(model: nn.Module) -> Iterator[LayerReport]:
    for name, module in quantized_layers(model).items():
        record = module.executor.weight
        yield LayerReport(name, record.shape, record.bits, record.nbytes, module.kernel, None)


def tensor_bytes(model: nn.Module) -> int:
    """Bytes of all weights and buffers, shared ones once. Of a quantized layer: of its record."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }
    return sum(storages.values()) + sum(module.executor.weight.nbytes for module in quantized_layers(model).values())
