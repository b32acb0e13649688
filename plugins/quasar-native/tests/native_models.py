"""Tiny models in every format that the engine runs, for its tests."""

from __future__ import annotations

import functools

import attrs
import torch

from quasar.kernels.reference import ReferenceKernel
from quasar.quantizers.hqq import HqqQuantizer
from quasar.quantizers.w8a8.quantizer import W8A8Quantizer
from quasar.testing.models import tiny
from quasar.weights.layers import linear_layers, replace_module, structure_copy
from quasar.weights.linear import QuantizedLinear
from quasar.weights.record import QuantizedWeight, quantize_symmetric

SUPPORTED = ("llama", "mistral_window", "qwen2", "qwen3", "gemma2", "gemma3")
"""Those of quasar.testing.models; SmolLM3 is added here."""

FORMATS = (
    "float32",
    "bfloat16",
    "w8a8",
    "w8 groups of 32",
    "static",
    "hqq groups of 32",
    "hqq groups of 64",
    "hqq a8 groups of 32",
    "ordered",
)


def smollm3(**options):
    """Two layers without positions among four; ``sliding_window`` gives these two a window."""
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = SmolLM3Config(
        **{**sizes, **heads, **ids, "initializer_range": 0.2, "no_rope_layer_interval": 2, **options}
    )
    torch.manual_seed(0)
    return SmolLM3ForCausalLM(config).eval()


@functools.cache
def model_of(family: str):
    """A model that no test changes."""
    return smollm3() if family == "smollm3" else tiny(family)


def _replaced(model, record_of):
    """A copy of ``model`` all of whose linear layers are records, executed by the reference kernel."""
    copy = structure_copy(model)
    for layer in list(linear_layers(copy)):
        executor = ReferenceKernel().prepare(record_of(layer.weight))
        replace_module(copy, layer.name, QuantizedLinear(executor, layer.bias))
    copy.config.tie_word_embeddings = False
    return copy


def _rounding_inputs(quantized):
    """The same weights, their inputs rounded group by group."""
    for layer in list(quantized.modules()):
        if isinstance(layer, QuantizedLinear):
            record = attrs.evolve(layer.executor.weight, activations="int8_per_group")
            layer.executor, layer.activations = ReferenceKernel().prepare(record), record.activations
    return quantized


def _grouped(weight):
    values, scales = quantize_symmetric(weight, 8, 32)
    return QuantizedWeight(values, scales, activations="int8_per_group")


def _static(weight):
    values, scales = quantize_symmetric(weight)
    return QuantizedWeight(values, scales, activations="int8_static", input_scale=torch.tensor(0.05))


def _ordered(weight):
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
    values, scales = quantize_symmetric(weight[:, order], 4, 32)
    return QuantizedWeight(values, scales, bits=4, input_order=order)


@functools.cache
def in_format(form: str, family: str = "llama"):
    """The tiny model of a family, its linear layers in one of :data:`FORMATS`."""
    model = model_of(family)
    if form == "float32":
        return model
    if form == "bfloat16":
        return tiny(family, dtype=torch.bfloat16)
    if form == "w8a8":
        return W8A8Quantizer(lm_head=True).quantize(model).model
    if form.startswith("hqq"):
        quantized = HqqQuantizer(group=int(form.split()[-1]), lm_head=True).quantize(model).model
        return _rounding_inputs(quantized) if "a8" in form else quantized
    return _replaced(model, {"w8 groups of 32": _grouped, "static": _static, "ordered": _ordered}[form])


def random_tokens(n: int, seed: int = 1) -> list[int]:
    """Any ids of the tiny vocabulary."""
    return torch.randint(64, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain_logits(model, token_ids):
    """``[T, V]`` float32 logits of transformers, without a cache."""
    with torch.no_grad():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
