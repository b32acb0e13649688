"""The quantizer hqq: the library's own values in our record, executed by our kernels."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quasar import Pipeline
from quasar.errors import InvalidRequestError, UnsupportedModelError
from quasar.kernels.dense import DenseKernel
from quasar.kernels.reference import ReferenceKernel
from quasar.quantizers.hqq import HqqQuantizer, quantize_hqq
from quasar.registry.registry import default_registry
from quasar.testing.models import random_prompt, tiny
from quasar.testing.running import examples
from quasar.weights.linear import QuantizedLinear
from quasar.weights.record import QuantizedWeight


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def library_values(weight: torch.Tensor, bits: int, group: int, axis: int) -> torch.Tensor:
    """What hqq itself maps back to, packed and unpacked by its own code."""
    from hqq.core.quantize import Quantizer

    packed, meta = Quantizer.quantize(
        weight, nbits=bits, group_size=group, axis=axis, compute_dtype=torch.float32, device="cpu"
    )
    return Quantizer.dequantize(packed, {**meta, "compute_dtype": torch.float32})


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize(("shape", "group"), [((64, 64), 16), ((40, 128), 64), ((8, 96), 32)])
def test_the_record_maps_back_to_what_the_library_maps_back_to(bits, shape, group):
    """Bits, groups, shapes that are no powers of two: equal but for the last bit of a product."""
    weight = randn(*shape, seed=bits)
    record = quantize_hqq(weight, bits=bits, group=group, axis=1)
    assert torch.allclose(record.dequantize(), library_values(weight, bits, group, 1), atol=1e-6)
    assert record.bits == bits
    assert record.group_size == group
    assert int(record.values.max()) - int(record.values.min()) <= 2**bits - 1


def test_groups_down_the_columns_are_those_of_the_library_too():
    """hqq's own default axis: a scale belongs to weights of one input."""
    weight = randn(64, 48, seed=5)
    record = quantize_hqq(weight, bits=4, group=32, axis=0)
    assert torch.allclose(record.dequantize(), library_values(weight, 4, 32, 0), atol=1e-6)


def test_it_is_nearer_than_rounding_to_nearest():
    """That is what the optimisation is for: a smaller error in the norm that it minimises."""
    from hqq.core.quantize import Quantizer

    weight = randn(64, 256, seed=1) ** 3  # heavy tails, as the weights of a model have
    plain, meta = Quantizer.quantize(
        weight, nbits=3, group_size=64, axis=1, optimize=False, bitpack=False, compute_dtype=torch.float32, device="cpu"
    )
    nearest = ((plain.reshape(-1, 64) - meta["zero"]) * meta["scale"]).reshape(weight.shape)
    own = quantize_hqq(weight, bits=3, group=64, axis=1).dequantize()
    assert (own - weight).abs().pow(0.7).mean() < (nearest - weight).abs().pow(0.7).mean()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": 48}, r"group=48 does not divide the 64 inputs of layer model.layers.0.self_attn.q_proj, shape"),
        ({"group": 64, "axis": 0}, r"group=64 does not divide the 32 outputs of layer .*k_proj, shape \[32, 64\]"),
        ({"include": "*.nothing"}, r"no layer matches '\*.nothing'; layers are named model.layers.0.self_attn.q_proj"),
    ],
)
def test_what_does_not_fit_names_layer_shape_and_choices_and_touches_nothing(options, message):
    """Before any weight is quantized."""
    model = tiny("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(InvalidRequestError, match=message):
        HqqQuantizer(**options).quantize(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "bits=5, expected one of 8, 4, 3, 2"),
        ({"bits": True}, "bits=True"),
        ({"group": 0}, "group=0, expected a positive integer, or -1"),
        ({"axis": 2}, "axis=2, expected one of 0, 1"),
        ({"lm_head": "yes"}, "lm_head='yes', expected true or false"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    """With what would do."""
    with pytest.raises(InvalidRequestError, match=message):
        HqqQuantizer(**options)


def layers_of(model) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]


@pytest.mark.parametrize("quantizer", ["hqq", "w8a8"])
def test_patterns_choose_the_layers(quantizer):
    """``include`` and ``exclude`` speak of names; what is left alone is listed."""
    model = tiny("llama")
    build = default_registry().build
    only = build("quantizer", f"{quantizer}:include=*.mlp.*|*.q_proj,exclude=*.1.*")
    made = only.quantize(model)
    assert layers_of(made.model) == [
        f"model.layers.0.{name}" for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    ]
    skipped = {entry["name"] for entry in made.report["skipped"]}
    assert {"model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"} <= skipped
    json.dumps(made.report)
    with pytest.raises(UnsupportedModelError, match=f"no linear layer that {quantizer} could quantize"):
        build("quantizer", f"{quantizer}:exclude=*").quantize(model)


def test_the_report_has_bytes_and_errors():
    """Fewer bits, a larger error; the bytes are those of all tensors of the record."""
    errors = {}
    for bits in (8, 4, 2):
        quantizer = HqqQuantizer(bits=bits, group=32)
        made = quantizer.quantize(tiny("llama"))
        layers = made.report["layers"]
        assert len(layers) == 14
        assert layers[0]["nbytes"] == 64 * 64 + 2 * 4 * 64 * 2
        assert {layer["kernel"] for layer in layers} == {"dense"}
        errors[bits] = max(layer["error"] for layer in layers)
    assert 0 < errors[8] < 0.02 < errors[4] < errors[2] < 1


def grouped(out: int, groups: int, group_size: int, seed: int) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-8, 8, (out, groups * group_size), dtype=torch.int8, generator=generator)
    scales = torch.rand((out, groups), generator=generator) + 0.1
    return QuantizedWeight(values, scales, torch.randn((out, groups), generator=generator), bits=4)


@examples(60)
@given(st.integers(1, 70), st.integers(1, 5), st.sampled_from([8, 32]), st.integers(0, 999))
def test_the_dense_kernel_equals_the_oracle_and_each_row_stands_alone(out, groups, group_size, seed):
    """Up to rounding the same product; bit by bit the same row in any of 16 widths, and with any leading shape."""
    weight = grouped(out, groups, group_size, seed)
    inputs = randn(16, groups * group_size, seed=seed)
    execute = DenseKernel().prepare(weight)
    assert torch.allclose(execute(inputs), ReferenceKernel().prepare(weight)(inputs), rtol=1e-4, atol=1e-3)
    alone = torch.cat([execute(row) for row in inputs.split(1)])
    for width in range(1, 17):
        assert torch.equal(execute(inputs[-width:]), alone[-width:]), f"width {width}"
    assert torch.equal(execute(inputs.reshape(2, 8, -1)).reshape(alone.shape), alone)
    assert execute(inputs.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_strictly_verified_output_is_that_of_plain_decoding(family):
    """Drafts that are right and wrong, with the quantized model as the target."""
    pipe = Pipeline.from_model(tiny(family), quantizer="hqq:bits=3,group=32", strict=True, drafter="ngram:k=4,max_n=2")
    prompt = [*random_prompt(6), *random_prompt(6)]
    result = pipe.generate_ids(prompt, max_new_tokens=60)
    assert result.token_ids == pipe.reference(prompt, max_new_tokens=60).token_ids
    assert result.guarantee.startswith("quantized: ")
    assert "without exception" in result.guarantee


@pytest.mark.real_model
def test_a_real_model_in_eight_bits_says_what_it_said(smollm2):
    """SmolLM2: the first tokens are those of the full model, and drafts change nothing."""
    pipe = Pipeline.from_model(smollm2.model, smollm2.tokenizer, quantizer="hqq:bits=8,group=64")
    full = Pipeline.from_model(smollm2.model, smollm2.tokenizer, quantizer="none")
    question = "What is the capital of France?"
    result = pipe.generate(question, max_new_tokens=24)
    assert result.token_ids == pipe.reference(question, max_new_tokens=24).token_ids
    assert result.token_ids[:8] == full.generate(question, max_new_tokens=24).token_ids[:8]


@pytest.mark.parametrize("quantizer", ["hqq:group=32", "w8a8"])
def test_a_tied_head_is_told_apart_only_where_it_is_quantized(quantizer):
    """Asked for and left out by a pattern, it still shares the embedding's matrix."""
    build, model = default_registry().build, tiny("llama", tie_word_embeddings=True)
    options = "," if ":" in quantizer else ":"
    whole = build("quantizer", f"{quantizer}{options}lm_head=true").quantize(model).model
    assert isinstance(whole.lm_head, QuantizedLinear)
    assert not whole.config.tie_word_embeddings
    without = build("quantizer", f"{quantizer}{options}lm_head=true,exclude=lm_head").quantize(model).model
    assert without.lm_head.weight is without.get_input_embeddings().weight
    assert without.config.tie_word_embeddings
    assert model.config.tie_word_embeddings
