"""What a quantizer makes of a model: layer by layer, and in bytes."""

from __future__ import annotations

from typing import Any

from torch import nn

from quasar.models import load_model
from quasar.plan import Plan
from quasar.quantizers.linear import QuantizedLinear


def inspect_model(name: str, *, dtype: str | None = None, device: str | None = None, **choices: Any) -> dict[str, Any]:
    """Load a model and quantize it; returns what ``quasar inspect --json`` prints.

    Args:
        name: As for :func:`quasar.models.load_model`.
        choices: ``quantizer`` and ``calibration``; see :class:`quasar.plan.Plan`.

    Returns:
        ``quantizer``: its options; ``layers`` and ``skipped``: as it describes them, maybe empty; ``full_bytes`` and
        ``quantized_bytes``: of all tensors of the model and of its copy, a tensor that is used twice counted once.
    """
    plan = Plan.of(choices)  # type: ignore[arg-type]
    loaded = load_model(name, dtype=dtype, device=device)
    quantized = plan.quantizer.quantize(loaded.model, plan.calibration_for(loaded.model, loaded.tokenizer))
    description = dict(plan.quantizer.describe())
    layers, skipped = description.pop("layers", []), description.pop("skipped", [])
    return {
        "quantizer": description,
        "layers": layers,
        "skipped": skipped,
        "full_bytes": tensor_bytes(loaded.model),
        "quantized_bytes": tensor_bytes(quantized),
    }


def tensor_bytes(model: nn.Module) -> int:
    """Bytes of all weights and buffers, shared ones once. Of a quantized layer: of its record."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }
    records = {id(module): module for module in model.modules() if isinstance(module, QuantizedLinear)}
    return sum(storages.values()) + sum(module.executor.weight.nbytes for module in records.values())
