"""Which scheme a layer has is what the library says; what cannot be computed is refused by name."""

from __future__ import annotations

import re

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from hypothesis import given
from hypothesis import strategies as st
from made_by_the_library import make_checkpoint
from torch import nn

from quasar.errors import InvalidRequestError, NumericalError
from quasar.testing.models import tiny
from quasar.testing.running import examples
from quasar_compressed_tensors.checkpoint import CompressedTensorsCheckpoint
from quasar_compressed_tensors.schemes import Schemes

W8 = {"num_bits": 8, "strategy": "channel"}
W4 = {"num_bits": 4, "strategy": "group", "group_size": 32}
PER_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}


def config(weights=W8, activations=None, *, targets=("Linear",), stored="int-quantized", scheme=None, **more):
    group = {"targets": list(targets), "weights": weights, "input_activations": activations, **(scheme or {})}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "format": stored, **more}


PATTERNS = st.lists(
    st.sampled_from(
        [
            "Linear",
            "lm_head",
            "re:.*lm_head",
            "re:.*mlp.*",
            "re:.*down_proj$",
            "model.layers.0.self_attn.q_proj",
            "model.layers.1.mlp.down_proj",
            "re:model.layers.1",
            "down_proj",
            "LlamaMLP",
        ]
    ),
    max_size=3,
    unique=True,
)


@examples(80)
@given(PATTERNS.filter(bool), PATTERNS.filter(bool), PATTERNS)
def test_each_layer_has_the_scheme_that_the_library_gives_it(first, second, ignore):
    """Names, patterns and classes, two groups that may overlap, and a list of what to ignore."""
    groups = {"eight": {"targets": first, "weights": W8}, "four": {"targets": second, "weights": W4}}
    raw = {"config_groups": groups, "ignore": ignore, "format": "naive-quantized"}
    model = _MODEL_ON_META()
    apply_quantization_config(model, QuantizationConfig(**raw), show_progress=False)
    schemes = Schemes(raw)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            theirs, own = getattr(module, "quantization_scheme", None), schemes.of(name)
            assert (own and own.weights.num_bits) == (theirs and theirs.weights.num_bits), name


def _MODEL_ON_META():  # noqa: N802
    with torch.device("meta"):
        return type(_LLAMA)(_LLAMA.config)


_LLAMA = tiny("llama")


def test_two_groups_of_one_checkpoint_keep_their_formats(tmp_path):
    """The format mixed-precision: each group says its own."""
    groups = {
        "attention": {"targets": ["re:.*self_attn.*"], "weights": W8, "input_activations": PER_TOKEN},
        "mlp": {"targets": ["re:.*mlp.*"], "weights": W4},
    }
    made = make_checkpoint(tmp_path, groups)
    assert made.config["format"] == "mixed-precision"
    reader = CompressedTensorsCheckpoint(made.config)
    kinds = set()
    for name, module in made.linear_layers().items():
        if name != "lm_head":
            record = reader.read(name, made.layer(name))
            assert torch.equal(record.dequantize(), module.weight)
            kinds.add((name.split(".")[3], record.bits, record.activations))
    assert kinds == {("self_attn", 8, "int8_per_token"), ("mlp", 4, "none")}


def test_a_scheme_may_be_given_by_the_name_of_a_preset():
    """As in ``{"W8A8": ["Linear"]}``; one without weights quantizes nothing."""
    scheme = Schemes({"config_groups": {"W8A8": ["Linear"]}, "format": "int-quantized"}).of("layer")
    assert (scheme.weights.num_bits, scheme.weights.strategy, scheme.activations) == (8, "channel", "int8_per_token")
    nothing = {"config_groups": {"group_0": {"targets": ["Linear"]}}, "format": "int-quantized"}
    assert Schemes(nothing).of("layer") is None


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            config({"num_bits": 8, "type": "float", "strategy": "channel"}),
            "weights are float8 symmetric, static per",
        ),
        (config({"num_bits": 16, "strategy": "channel"}), "weights are int16 .* supported are int1 to int8"),
        (
            config({"num_bits": 8, "strategy": "block", "block_structure": [32, 32]}),
            "weights are int8 symmetric, static per block; supported are int1 to int8, static per tensor, channel, gr",
        ),
        (config({"num_bits": 8, "strategy": "tensor", "dynamic": True}), "weights are int8 symmetric, dynamic per ten"),
        (
            config(W8, {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": False}),
            "input_activations are int8 asymmetric, dynamic per token; supported are int8 symmetric, dynamic per token",
        ),
        (config(W8, {"num_bits": 8, "strategy": "tensor", "symmetric": False}), "int8 asymmetric, static per tensor"),
        (config(W8, {"num_bits": 8, "strategy": "tensor", "dynamic": True}), "int8 symmetric, dynamic per tensor;"),
        (
            config(W8, {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}),
            "are float8 symmetric",
        ),
        (config(W8, {"num_bits": 4, "strategy": "token", "dynamic": True}), "are int4 symmetric, dynamic per token"),
        (
            config(W8, {"num_bits": 8, "strategy": "group", "group_size": 32, "dynamic": True}),
            "int8 symmetric, dynamic per group",
        ),
        (
            config({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
            "weights are float4 symmetric, static per tensor_group",
        ),
        (
            config(W8, {"num_bits": 8, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}),
            r"int8 symmetric, dynamic \(local\) per tensor_group",
        ),
        (config(stored="float-quantized"), "the format 'float-quantized' is not one of int-quantized, naive-quantized"),
        (config(stored="my-own"), "the format 'my-own' is not one of"),
        (config(stored="mixed-precision"), "the format 'mixed-precision' is not one of"),
        (config(scheme={"format": "nvfp4-pack-quantized"}), "the format 'nvfp4-pack-quantized' is not one of"),
        (config(targets=["Embedding", "Linear"]), "embeddings cannot be quantized"),
        (config(None, PER_TOKEN, targets=["LlamaAttention"]), "activations are quantized and no weights"),
        (config(scheme={"output_activations": PER_TOKEN}), "output_activations cannot be quantized"),
    ],
)
def test_what_cannot_be_computed_is_refused_naming_the_group(raw, message):
    """Before a file is read, with its targets and with what would do."""
    with pytest.raises(InvalidRequestError, match=message) as refused:
        CompressedTensorsCheckpoint(raw)
    assert re.match(r"compressed-tensors: config group 'group_0' \(targets [A-Za-z, ]+\): ", str(refused.value))
    assert str(refused.value).endswith(
        "quantize with the scheme W8A8 or W4A16 of llm-compressor, or give the full model and a quantizer of Quasar"
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: Quasar keeps keys and values in full precision"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config with the format 'sparse-24-bitmask'"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "transform_config: transforms of activations are not"),
        ({"moe_sparsity_config": {"method": "prune"}}, "moe_sparsity_config: pruned experts are not supported"),
    ],
)
def test_what_lies_beside_the_weights_is_refused_by_name(more, message):
    """Rather than ignored: the output would be another."""
    with pytest.raises(InvalidRequestError, match=message):
        CompressedTensorsCheckpoint(config(**more))


def test_empty_sections_beside_the_weights_say_nothing():
    """The library writes them into every configuration."""
    empty = {"kv_cache_scheme": None, "transform_config": {}, "sparsity_config": {}, "moe_sparsity_config": None}
    assert Schemes(config(**empty)).of("layer") is not None
    assert Schemes(config(sparsity_config={"format": "dense"})).of("layer") is not None


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "config_groups: Field required"),
        ({"config_groups": {"W9A9": ["Linear"]}}, "Unknown preset scheme name W9A9"),
        ({"config_groups": 3}, "config_groups: Input should be a valid dictionary"),
        (config({"num_bits": 4, "strategy": "group"}), "requires group_size to be set to a positive value"),
        (config({"num_bits": 4, "flavour": "mild"}), "weights.flavour: Extra inputs are not permitted"),
        (config(scheme={"format": "my-own"}), "format: Input should be 'dense'"),
        (config(W8, {"num_bits": 8, "strategy": "channel"}), "channel.* strategy is not supported for activation"),
    ],
)
def test_a_broken_configuration_is_refused_in_one_line(raw, message):
    """With what the library says of it."""
    with pytest.raises(InvalidRequestError, match=message) as refused:
        CompressedTensorsCheckpoint(raw)
    assert str(refused.value).startswith("compressed-tensors: the library cannot read quantization_config: ")
    assert "\n" not in str(refused.value)


def test_a_configuration_is_left_as_it_was():
    """Also one with an order by group, which the library would not read."""
    raw = config({**W4, "actorder": "group"})
    Schemes(raw)
    assert raw == config({**W4, "actorder": "group"})


INT8 = torch.int8
EIGHT = (
    config(W8, {"num_bits": 8, "strategy": "tensor"}),
    {
        "weight": torch.ones((4, 32), dtype=INT8),
        "weight_scale": torch.ones(4, 1),
        "input_scale": torch.ones(1),
    },
)
ASYMMETRIC = (
    config({**W8, "symmetric": False}),
    {
        "weight": torch.ones((4, 32), dtype=INT8),
        "weight_scale": torch.ones(4, 1),
        "weight_zero_point": torch.ones((4, 1), dtype=INT8),
    },
)
PACKED = (
    config({**W4, "symmetric": False}, stored="pack-quantized"),
    {
        "weight_packed": torch.ones((16, 8), dtype=torch.int32),
        "weight_shape": torch.tensor([16, 64]),
        "weight_scale": torch.ones(16, 2),
        "weight_zero_point": torch.ones((2, 2), dtype=torch.int32),
    },
)
FOUR = (
    config(W4),
    {"weight": torch.ones((4, 64), dtype=INT8), "weight_scale": torch.ones(4, 2)},
)
ORDERED = (
    config({**W4, "actorder": "group"}),
    {**FOUR[1], "weight_g_idx": torch.arange(64) % 2},
)
DENSE = (config(W8, stored="dense"), {"weight": torch.ones(4, 32), "weight_scale": torch.ones(4, 1)})


@pytest.mark.parametrize("good", [EIGHT, ASYMMETRIC, PACKED, FOUR, ORDERED, DENSE])
def test_the_examples_below_are_read_when_nothing_is_broken(good):
    """So each refusal below is for what it changes."""
    assert CompressedTensorsCheckpoint(good[0]).read("model.layers.0.mlp.up_proj", good[1]) is not None


@pytest.mark.parametrize(
    ("good", "change", "message"),
    [
        (EIGHT, {"weight_scale": None}, "the checkpoint has no weight_scale; it has input_scale, weight"),
        (EIGHT, {"weight": None}, "the checkpoint has no weight; it has input_scale, weight_scale"),
        (EIGHT, {"input_scale": None}, "the checkpoint has no input_scale"),
        (EIGHT, {"input_scale": torch.tensor([0.0])}, r"input_scale is \[0.0\], expected one positive number"),
        (EIGHT, {"input_scale": torch.tensor([float("inf")])}, r"input_scale is \[inf\]"),
        (EIGHT, {"input_scale": torch.ones(32)}, r"input_scale is \[1.0, 1.0, 1.0\], expected one"),
        (EIGHT, {"input_zero_point": torch.tensor([3])}, "input_zero_point is not zero, but the config group says sym"),
        (EIGHT, {"weight_zero_point": torch.tensor([3])}, "weight_zero_point is not zero, but the config group says s"),
        (EIGHT, {"weight": torch.ones(4, 32)}, r"weight is torch.float32 \[4, 32\], expected int8 \[out, in\]"),
        (EIGHT, {"weight": torch.ones((4, 32), dtype=torch.int32)}, r"weight is torch.int32 \[4, 32\], expected int8"),
        (
            EIGHT,
            {"weight": torch.ones((4, 0), dtype=INT8)},
            r"weight is torch.int8 \[4, 0\], expected int8",
        ),
        (EIGHT, {"weight": torch.ones((2, 4, 32), dtype=INT8)}, r"weight is torch.int8 \[2, 4, 32\], expected int8"),
        (EIGHT, {"weight_scale": torch.ones(5, 1)}, r"weight_scale is \[5, 1\], expected \[4, 1\]"),
        (EIGHT, {"weight_scale": torch.ones((4, 1), dtype=torch.uint8)}, r"weight_scale is torch.uint8 \[4, 1\]"),
        (ASYMMETRIC, {"weight_zero_point": None}, "the checkpoint has no weight_zero_point"),
        (ASYMMETRIC, {"weight_zero_point": torch.ones(3, 1).to(INT8)}, r"weight_zero_point is \[3, 1\], expected \[4"),
        (
            ASYMMETRIC,
            {"weight_zero_point": torch.ones(4, 1)},
            "weight_zero_point is torch.float32 .* expected int",
        ),
        (PACKED, {"weight_shape": None}, "the checkpoint has no weight_shape; it has weight_packed"),
        (PACKED, {"weight_packed": None}, "the checkpoint has no weight_packed"),
        (PACKED, {"weight_shape": torch.tensor([64])}, r"weight_shape is \[64\], expected \[out, in\]"),
        (PACKED, {"weight_shape": torch.tensor(64)}, r"weight_shape is \[64\], expected \[out, in\]"),
        (PACKED, {"weight_shape": torch.tensor([16, 0])}, r"weight_shape is \[16, 0\], expected \[out, in\]"),
        (PACKED, {"weight_shape": torch.tensor([16, 128])}, r"int32 \[16, 8\], expected torch.int32 \[16, 16\]"),
        (
            PACKED,
            {"weight_packed": torch.ones(16, 8)},
            r"weight_packed is torch.float32 \[16, 8\], expected torch.int32",
        ),
        (
            PACKED,
            {"weight_zero_point": torch.ones((16, 2), dtype=torch.int32)},
            r"int32 \[16, 2\], expected.*2, 2\]",
        ),
        (FOUR, {"weight": torch.full((4, 64), 8, dtype=INT8)}, "weight holds values outside -8…7, the range of 4 bits"),
        (FOUR, {"weight": torch.full((4, 64), -9, dtype=INT8)}, "weight holds values outside -8…7"),
        (FOUR, {"weight": torch.ones((4, 48), dtype=INT8)}, "groups of 32 do not divide its 48 inputs"),
        (FOUR, {"weight_scale": torch.ones(4, 1)}, r"weight_scale is \[4, 1\], expected \[4, 2\]"),
        (FOUR, {"weight_scale": torch.ones(4)}, r"weight_scale is \[4\], expected \[4, 2\]"),
        (ORDERED, {"weight_g_idx": None}, "the checkpoint has no weight_g_idx; it has weight, weight_scale"),
        (ORDERED, {"weight_g_idx": torch.arange(32)}, r"weight_g_idx is \[32\], expected \[64\]"),
        (ORDERED, {"weight_g_idx": torch.arange(64) // 31}, "does not give each of 2 groups 32 inputs"),
        (ORDERED, {"weight_g_idx": torch.arange(64) % 2 + 1}, "does not give each of 2 groups 32 inputs"),
        (DENSE, {"weight": torch.ones((4, 32), dtype=INT8)}, r"weight is torch.int8 \[4, 32\], expected floating"),
        (DENSE, {"weight_scale": None}, "the checkpoint has no weight_scale; it has weight"),
    ],
)
def test_a_broken_layer_is_refused_naming_it_and_what_was_expected(good, change, message):
    """A tensor that is missing, or of another shape, dtype or range."""
    tensors = {key: tensor for key, tensor in {**good[1], **change}.items() if tensor is not None}
    reader = CompressedTensorsCheckpoint(good[0])
    with pytest.raises(InvalidRequestError, match=message) as refused:
        reader.read("model.layers.0.mlp.up_proj", tensors)
    assert "layer model.layers.0.mlp.up_proj (config group 'group_0', " in str(refused.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_refused_by_name(value):
    """Rather than met as NaN logits."""
    scales = torch.ones(4, 1)
    scales[2] = value
    with pytest.raises(NumericalError, match=r"layer\.weight_scale has values that are not finite"):
        CompressedTensorsCheckpoint(EIGHT[0]).read("layer", {**EIGHT[1], "weight_scale": scales})


@pytest.mark.parametrize("tensors", [{"weight": torch.ones((4, 32), dtype=INT8)}, {"weight_packed": torch.ones(4, 4)}])
def test_a_quantized_layer_that_no_group_is_for_is_refused(tensors):
    """Rather than taken for one in full precision."""
    with pytest.raises(InvalidRequestError, match="layer lm_head is stored quantized, but no config group"):
        CompressedTensorsCheckpoint(config(ignore=["lm_head"])).read("lm_head", tensors)


def test_a_layer_that_is_ignored_and_stored_in_full_is_left_to_the_core():
    """In any floating dtype."""
    reader = CompressedTensorsCheckpoint(config(ignore=["re:.*head$"]))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert reader.read("lm_head", {"weight": torch.ones((4, 32), dtype=dtype)}) is None
