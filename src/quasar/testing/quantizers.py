"""Does a quantizer keep the protocol? One call: :func:`check_quantizer`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quasar.errors import InvalidRequestError, NumericalError, QuasarError, UnsupportedModelError
from quasar.loop.checks import quantize
from quasar.protocols import Quantizer
from quasar.registry.registry import default_registry
from quasar.testing.models import random_prompt, tiny
from quasar.testing.running import global_random_state_kept, other_defaults, require
from quasar.types import Quantized
from quasar.weights.layers import linear_layers

_WIDE = 50.0
_WIDEST = 64
"""Rows of one call that a layer is tried with: the largest drafts that are verified at once."""


def default_models() -> dict[str, PreTrainedModel]:
    """One tiny model of each kind that quantizers are known to get wrong."""
    return {
        "llama": tiny("llama"),
        "a tied output head (llama)": tiny("llama", tie_word_embeddings=True),
        "biases (qwen2)": tiny("qwen2"),
        "Conv1D layers (gpt2)": tiny("gpt2"),
        "bfloat16 (llama)": tiny("llama", dtype=torch.bfloat16),
    }


def check_quantizer(
    quantizer: str | Quantizer,
    models: Mapping[str, PreTrainedModel] | None = None,
    *,
    max_error: float = 0.5,
) -> None:
    """Check that a quantizer keeps its protocol, on models that differ in what is easily forgotten.

    The model that was given is left as it was, and shares with the copy what did not change; logits keep shape and
    dtype; a row of a quantized layer does not depend on the rows beside it, up to 64 of them, and is near that of the
    full layer; biases are kept; the input embedding is kept, also where the output head shares it; a second quantizing
    is refused or does nothing; without calibration it works or is refused; a weight that is not finite is refused by
    name; the same model gives the same copy, whatever torch's default dtype and device are; ``describe()`` is JSON.

    Args:
        quantizer: Spec string or Quantizer.
        models: Causal LMs by a name for messages; ``None``: :func:`default_models`.
        max_error: Largest error of a quantized layer's output, as a share of its size (root of mean squares).

    Raises:
        ConformanceError: A rule is broken; the message says which, on which model, and how.
        PluginError: Its signatures do not fit.
    """
    built: Quantizer = default_registry().build("quantizer", quantizer)
    subjects = default_models() if models is None else models
    refused: dict[str, UnsupportedModelError] = {}
    for name, model in subjects.items():
        subject = _Subject(built, f"{type(built).__name__} on {name}", model, max_error)
        try:
            check_on_model(subject)
        except UnsupportedModelError as error:
            refused[name] = error
    if len(refused) == len(subjects):
        raise next(iter(refused.values()))


@attrs.frozen(eq=False)
class _Subject:
    """One quantizer and one model, and how to call them in a message."""

    quantizer: Quantizer
    who: str
    model: PreTrainedModel
    max_error: float
    calibration: list[Tensor] = attrs.Factory(lambda: [torch.tensor([random_prompt(24, seed=s)]) for s in (1, 2)])

    def quantized(self) -> nn.Module:
        return self.made(self.calibration).model  # type: ignore[no-any-return]

    def made(self, calibration: list[Tensor] | None) -> Quantized:
        return quantize(self.quantizer, self.model, calibration)


def check_on_model(subject: _Subject) -> None:
    """All checks on one model."""
    before = {name: tensor.clone() for name, tensor in subject.model.state_dict().items()}
    settings, described = _settings_of(subject.model), subject.quantizer.describe()
    with global_random_state_kept(subject.who):
        made = subject.made(subject.calibration)
    quantized = made.model
    _check_unchanged(subject, before)
    for what, value in _settings_of(subject.model).items():
        require(value == settings[what], f"{subject.who} changed the {what} of the model that it was given")
    _check_sharing(subject, quantized)
    replaced = list(replaced_layers(subject.model, quantized))
    for name, full, layer in replaced:
        check_layer(subject, name, full, layer)
    _check_logits(subject, quantized)
    _check_rows_of_the_model(subject, quantized)
    _check_second_time(subject, quantized)
    _check_defaults(subject, quantized)
    _check_description(subject, described, made.report)
    _check_without_calibration(subject)
    if replaced:
        _check_non_finite(subject, before, replaced[len(replaced) // 2][0])


def replaced_layers(model: nn.Module, quantized: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Name, module of the full model, and what stands in its place, for each linear layer that was replaced."""
    for layer in linear_layers(model):
        module = quantized.get_submodule(layer.name)
        weight = getattr(module, "weight", None)
        same = isinstance(weight, Tensor) and weight.data_ptr() == layer.module.weight.data_ptr()  # type: ignore[operator]
        if type(module) is not type(layer.module) or not same:
            yield layer.name, layer.module, module


@torch.no_grad()
def check_layer(subject: _Subject, name: str, full: nn.Module, layer: nn.Module) -> None:
    """One layer: rows by themselves, bias, nearness to the full layer, dtype."""
    width = next(found.weight.shape[1] for found in linear_layers(subject.model) if found.name == name)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn((_WIDEST, width), generator=generator).to(subject.model.dtype)
    rows[3::4] *= _WIDE
    where, alone = f"{subject.who}: layer {name}", torch.cat([layer(row.unsqueeze(0)) for row in rows])
    sizes = torch.tensor([_size(row) for row in full(rows)])
    for n in range(2, _WIDEST + 1):
        outputs = layer(rows[:n])
        require(outputs.dtype == rows.dtype, f"{where} gives {outputs.dtype} for {rows.dtype}")
        apart = float(((outputs - alone[:n]).abs().amax(dim=1) / sizes[:n]).max())
        require(
            apart <= (1e-4 if rows.dtype == torch.float32 else 2e-2),
            f"{where}: of {n} rows, one differs by {apart:.2g} of its size from the same row computed alone; scales of "
            "activations must be those of a row, not of the call, and arithmetic the same for any number of rows",
        )
    inputs, outputs = rows[:4], layer(rows[:4])
    batched = layer(inputs.unsqueeze(0))
    require(
        batched.shape == (1, *outputs.shape) and float((batched[0] - outputs).abs().max()) <= 1e-3 * _size(outputs),
        f"{where}: rows [T, in] and the same rows as [1, T, in] give different outputs; scales of activations must be "
        "those of a row, not of the call",
    )
    _check_bias(where, full, layer, inputs)


def _check_bias(where: str, full: nn.Module, layer: nn.Module, inputs: Tensor) -> None:
    zero = torch.zeros_like(inputs[:1])
    bias, kept = full(zero), layer(zero)
    # Smoothing may move a bias, by the factors that the next layer divides by, and by a shift of its inputs, which
    # gives one to a layer that had none; but none vanishes.
    require(
        bool((kept != 0)[bias != 0].all()),
        f"{where}: for an input of zeros the full layer gives its bias, and this one does not",
    )


def _settings_of(model: PreTrainedModel) -> dict[str, object]:
    """What a model has beside its tensors and could be left changed."""
    modules = list(model.modules())
    return {
        "configuration": model.config.to_dict(),
        "generation settings": model.generation_config.to_dict() if model.generation_config else None,
        "hooks": sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules),
        "training mode": [module.training for module in modules],
        "need for gradients": [parameter.requires_grad for parameter in model.parameters()],
    }


@torch.no_grad()
def _check_rows_of_the_model(subject: _Subject, quantized: Any) -> None:
    """Another last token moves no logits before it by more than rounding does."""
    token_ids = torch.tensor([random_prompt(12, seed=5)])
    other = token_ids.clone()
    other[0, -1] = (other[0, -1] + 1) % quantized.config.vocab_size
    rows = [quantized(input_ids=ids).logits[0, :-1].float() for ids in (token_ids, other)]
    moved = float((rows[0] - rows[1]).abs().max()) / _size(rows[0])
    require(moved <= 1e-4, f"{subject.who}: another last token moves earlier logits by {moved:.2g} of their size")


def _check_unchanged(subject: _Subject, before: Mapping[str, Tensor]) -> None:
    state = subject.model.state_dict()
    changed = sorted(state.keys() ^ before.keys())
    require(not changed, f"{subject.who} changed the model that it was given: {', '.join(changed[:3])}")
    for name, tensor in state.items():
        require(
            torch.equal(tensor.nan_to_num(), before[name].nan_to_num()),
            f"{subject.who} changed {name} of the model that it was given",
        )


def _check_sharing(subject: _Subject, quantized: nn.Module) -> None:
    embedding, kept = _embedding(subject.model), _embedding(quantized)
    require(torch.equal(embedding, kept), f"{subject.who} changed the input embedding")
    require(embedding.data_ptr() == kept.data_ptr(), f"{subject.who} copied the input embedding, expected to share it")


def _embedding(model: Any) -> Tensor:
    weight: Tensor = model.get_input_embeddings().weight
    return weight


def _check_logits(subject: _Subject, quantized: nn.Module) -> None:
    full, other = _logits(subject.model), _logits(quantized)
    require(
        (full.shape, full.dtype) == (other.shape, other.dtype),
        f"{subject.who}: logits are {list(other.shape)} {other.dtype}, expected {list(full.shape)} {full.dtype}",
    )
    error = _size(other - full) / _size(full)
    require(error <= 2 * subject.max_error, f"{subject.who}: logits differ from the full model's by {error:.2g}")
    again = _logits(subject.quantized())
    require(torch.equal(other, again), f"{subject.who}: quantizing the same model again gives other logits")
    if isinstance(quantized, PreTrainedModel):
        quantized.tie_weights()
        require(torch.equal(other, _logits(quantized)), f"{subject.who}: tie_weights() undoes a part of it")


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    """``[T, V]`` on a fixed text."""
    logits: Tensor = model(input_ids=torch.tensor([random_prompt(20, seed=4)], device="cpu")).logits[0]
    return logits


def _check_second_time(subject: _Subject, quantized: nn.Module) -> None:
    expected = _logits(quantized)
    try:
        twice = quantize(subject.quantizer, quantized, subject.calibration).model
    except QuasarError:
        return
    require(
        torch.equal(_logits(twice), expected),
        f"{subject.who}: a model that is quantized already is quantized once more; refuse it, or leave it as it is",
    )


def _check_defaults(subject: _Subject, quantized: nn.Module) -> None:
    """Under another default dtype and device of the process: the same copy, with the same logits."""
    expected = _logits(quantized)
    with other_defaults():
        for what, model in (("run", quantized), ("made", subject.quantized())):
            require(
                torch.equal(_logits(model), expected),
                f"{subject.who}: {what} under another default dtype of torch, the copy has other logits; name the "
                "dtype and the device of every tensor that is made",
            )


def _check_without_calibration(subject: _Subject) -> None:
    """It does without, or says that it cannot."""
    with contextlib.suppress(InvalidRequestError):
        subject.made(None)


def _check_description(subject: _Subject, before: Mapping[str, Any], report: Mapping[str, Any]) -> None:
    """It and the report can be written as JSON, and quantizing leaves nothing of a model in the description.

    Args:
        before: The description before anything of this model was quantized.
        report: What was said of this model.
    """
    for what, said in (("describe()", before), ("the report", report)):
        try:
            json.dumps(said)
        except (TypeError, ValueError) as error:
            require(False, f"{subject.who}: {what} is not JSON-serialisable: {error}")
    require(
        subject.quantizer.describe() == before,
        f"{subject.who}: describe() says something else after quantizing; what belongs to a model goes into its report",
    )


@torch.no_grad()
def _check_non_finite(subject: _Subject, before: Mapping[str, Tensor], name: str) -> None:
    """A NaN in a layer that it quantizes, ``name``, is refused by that name, and the model is left as it was."""
    weight: Tensor = subject.model.get_submodule(name).weight  # type: ignore[assignment]
    for value in (float("nan"), float("inf")):
        kept = weight[0, 0].clone()
        weight[0, 0] = value
        try:
            subject.made(subject.calibration)
            refused = None
        except NumericalError as error:
            refused = str(error)
        finally:
            weight[0, 0] = kept
        require(refused is not None, f"{subject.who}: {name}.weight holds {value} and is quantized without a word")
        require(name in str(refused), f"{subject.who}: the refusal of {value} does not name {name}: {refused}")
        _check_unchanged(subject, before)


def _size(tensor: Tensor) -> float:
    return float(tensor.double().pow(2).mean().sqrt()) or 1.0
