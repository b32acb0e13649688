"""Quantize a model by its name and keep the result: what ``quasar quantize`` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quasar.checkpoints.models import load_model
from quasar.checkpoints.saving import check_target, save_quantized
from quasar.commands.inspect import report_of
from quasar.errors import InvalidRequestError
from quasar.loop.checks import quantize
from quasar.pipeline.plan import Plan


def quantize_model(
    name: str, folder: str | Path, *, dtype: str | None = None, device: str | None = None, **choices: Any
) -> dict[str, Any]:
    """Load a model, quantize it and save it; returns what :func:`quasar.commands.inspect.inspect_model` would.

    What can be refused is refused before the model is loaded.

    Args:
        name: As for :func:`quasar.checkpoints.models.load_model`, which reads the result by ``folder``.
        folder: New, or empty.
        choices: ``quantizer`` and ``calibration``; see :class:`quasar.pipeline.plan.Plan`.

    Raises:
        InvalidRequestError: The folder is taken, or the quantizer is ``none``.
        QuasarError: As loading and quantizing raise.
    """
    target = Path(folder).expanduser()
    check_target(target)
    plan = Plan.of(choices)  # type: ignore[arg-type]
    if not plan.quantizes:
        raise InvalidRequestError(f"quantizer={plan.specs['quantizer']!r} leaves the model as it is; choose another")
    loaded = load_model(name, dtype=dtype, device=device)
    made = quantize(plan.quantizer, loaded.model, plan.calibration_for(loaded.model, loaded.tokenizer))
    report = report_of(loaded.model, made)
    save_quantized(target, made.model, loaded.tokenizer, {"spec": plan.specs["quantizer"], **made.report})
    return report
