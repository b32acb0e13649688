"""What a record maps back to is what the library decompresses; how inputs are rounded is how the library rounds."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp
from hypothesis import given
from hypothesis import strategies as st
from made_by_the_library import extremes, make_checkpoint

from quasar.testing.running import examples
from quasar.weights.activations import round_inputs
from quasar_compressed_tensors.checkpoint import CompressedTensorsCheckpoint

PER_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "strategy": "tensor"}
CHANNEL8 = {"num_bits": 8, "strategy": "channel"}
GROUP4 = {"num_bits": 4, "strategy": "group", "group_size": 32}

SCHEMES = {
    "W8A8": (CHANNEL8, PER_TOKEN, "int-quantized"),
    "W8A8 static": (CHANNEL8, STATIC, "int-quantized"),
    "W8A8 per tensor": ({"num_bits": 8, "strategy": "tensor"}, PER_TOKEN, "int-quantized"),
    "W8A8 asymmetric weights": ({**CHANNEL8, "symmetric": False}, PER_TOKEN, "int-quantized"),
    "W4A8": (GROUP4, PER_TOKEN, "int-quantized"),
    "W4A16": (GROUP4, None, "pack-quantized"),
    "W4A16 asymmetric": ({**GROUP4, "symmetric": False}, None, "pack-quantized"),
    "W4A16 per channel, asymmetric": ({**CHANNEL8, "num_bits": 4, "symmetric": False}, None, "pack-quantized"),
    "W4A16 per tensor, asymmetric": ({"num_bits": 4, "strategy": "tensor", "symmetric": False}, None, "pack-quantized"),
    "W3A16": ({**GROUP4, "num_bits": 3}, None, "pack-quantized"),
    "W8A16": ({**GROUP4, "num_bits": 8}, None, "pack-quantized"),
    "naive": (GROUP4, None, "naive-quantized"),
}


def grouped(weights, activations=None, *, targets=("Linear",), **scheme):
    return {"group_0": {"targets": list(targets), "weights": weights, "input_activations": activations, **scheme}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_layers_map_back_to_what_the_library_decompresses(tmp_path, scheme, dtype):
    """Bit for bit in the dtype of the scales; what is ignored is stored in full."""
    weights, activations, stored = SCHEMES[scheme]
    made = make_checkpoint(tmp_path, grouped(weights, activations), stored=stored, dtype=dtype)
    assert made.config["format"] == stored
    reader = CompressedTensorsCheckpoint(made.config)
    layers = made.linear_layers()
    assert reader.read("lm_head", made.layer("lm_head")) is None
    del layers["lm_head"]
    assert len(layers) == 14
    for name, module in layers.items():
        record = reader.read(name, made.layer(name))
        assert torch.equal(record.dequantize().to(dtype), module.weight)
        assert record.bits == weights["num_bits"]
        assert record.group_size == weights.get("group_size", module.in_features)
        assert (record.zero_points is None) == weights.get("symmetric", True)


@examples(150)
@given(
    bits=st.integers(1, 8),
    strategy=st.sampled_from(["tensor", "channel", "group"]),
    symmetric=st.booleans(),
    stored=st.sampled_from(["pack-quantized", "int-quantized", "naive-quantized", "dense"]),
    out=st.integers(1, 40),
    n_groups=st.integers(1, 4),
    group_size=st.integers(1, 24),
    seed=st.integers(0, 999),
)
def test_any_bits_shape_and_strategy(bits, strategy, symmetric, stored, out, n_groups, group_size, seed):
    """What the library's simulation rounds to; also where values straddle packed words, and shapes fill none."""
    size = n_groups * group_size
    args = {"num_bits": bits, "strategy": strategy, "symmetric": symmetric}
    args |= {"group_size": group_size} if strategy == "group" else {}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args), format=stored)
    weight = torch.randn((out, size), generator=torch.Generator().manual_seed(seed))
    scale, zero_point = calculate_qparams(*extremes(weight, scheme.weights), scheme.weights)
    full = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    tensors = BaseCompressor.get_value_from_registry(stored).compress(full, scheme)
    expected = fake_quantize(weight, scale, zero_point, scheme.weights)
    config = QuantizationConfig(config_groups={"only": scheme}, format=stored).model_dump(mode="json")
    record = CompressedTensorsCheckpoint(config).read("layer", tensors)
    assert torch.equal(record.dequantize(), expected)
    assert (record.bits, record.activations) == (bits, "none")


def layer_of(made, name="model.layers.1.mlp.down_proj"):
    return name, made.layer(name), made.linear_layers()[name]


def inputs_of(module, seed=2):
    inputs = torch.randn((1, 9, module.in_features), generator=torch.Generator().manual_seed(seed))
    return inputs * torch.logspace(-2, 1, 9).view(1, 9, 1)  # tokens of very different sizes


def test_dynamic_activations_are_rounded_token_by_token(tmp_path):
    """The library divides by 127.5 where we divide by 127: both are half a step at most from the input."""
    name, tensors, module = layer_of(made := make_checkpoint(tmp_path, grouped(CHANNEL8, PER_TOKEN)))
    record = CompressedTensorsCheckpoint(made.config).read(name, tensors)
    assert (record.activations, record.input_scale) == ("int8_per_token", None)
    inputs, args = inputs_of(module), module.quantization_scheme.input_activations
    own = round_inputs(inputs, record)
    theirs = fake_quantize(inputs, *compute_dynamic_scales_and_zp(inputs, args, module), args)
    assert ((own - theirs).abs() <= 1.01 * inputs.abs().amax(-1, keepdim=True) / 127).all()
    assert not torch.equal(own, inputs)


def test_static_activations_are_rounded_with_the_stored_scale(tmp_path):
    """Equal to the library's but at the lower end, which is −127 for us and −128 for the library."""
    name, tensors, module = layer_of(made := make_checkpoint(tmp_path, grouped(CHANNEL8, STATIC)))
    record = CompressedTensorsCheckpoint(made.config).read(name, tensors)
    assert record.activations == "int8_static"
    assert record.input_scale.shape == ()
    assert torch.equal(record.input_scale, module.input_scale[0])
    inputs, args = inputs_of(module), module.quantization_scheme.input_activations
    theirs = fake_quantize(inputs, module.input_scale, None, args)
    assert torch.equal(round_inputs(inputs, record), theirs.clamp(min=-127 * record.input_scale))
    assert (theirs.abs() < inputs.abs()).any()  # some are cut off


GROUPS_OF_COLUMNS = [1, 0, 0, 1, 2, 2]


@pytest.mark.parametrize("actorder", ["group", "dynamic", True, None])
def test_columns_of_a_group_may_lie_apart(actorder):
    """By hand: column j has the scale of group ``g_idx[j]`` (compressed-tensors 0.12, ``_process_quantization``)."""
    weights = {"num_bits": 8, "strategy": "group", "group_size": 2, "actorder": actorder}
    values = torch.tensor([[1, 2, 3, 4, 5, 6], [-1, -2, -3, -4, -5, -6]], dtype=torch.int8)
    scales = torch.tensor([[1.0, 10.0, 100.0], [2.0, 20.0, 200.0]])
    tensors = {"weight": values, "weight_scale": scales, "weight_g_idx": torch.tensor(GROUPS_OF_COLUMNS).int()}
    reader = CompressedTensorsCheckpoint({"config_groups": grouped(weights), "format": "int-quantized"})
    record = reader.read("layer", tensors)
    expected = torch.tensor([[10.0, 2, 3, 40, 500, 600], [-20.0, -4, -6, -80, -1000, -1200]])
    assert torch.equal(record.dequantize(), expected)
    assert record.input_order.tolist() == [1, 2, 0, 3, 4, 5]
    in_order = {**tensors, "weight_g_idx": torch.tensor([0, 0, 1, 1, 2, 2])}
    assert reader.read("layer", in_order).input_order is None
    unused = reader.read("layer", {**tensors, "weight_g_idx": torch.full((6,), -1)})
    assert torch.equal(unused.dequantize(), reader.read("layer", in_order).dequantize())


def test_an_order_without_groups_means_nothing():
    """A scale of a whole row is that of every column."""
    reader = CompressedTensorsCheckpoint({"config_groups": grouped(CHANNEL8), "format": "int-quantized"})
    tensors = {"weight": torch.ones((2, 6), dtype=torch.int8), "weight_scale": torch.ones(2, 1)}
    assert reader.read("layer", {**tensors, "weight_g_idx": torch.tensor(GROUPS_OF_COLUMNS)}).input_order is None


def test_a_dense_weight_is_rounded_in_the_order_of_its_groups():
    """The scale that rounds a column is that of its group, wherever the column lies."""
    weights = {"num_bits": 8, "strategy": "group", "group_size": 2, "actorder": "group"}
    weight = torch.tensor([[10.2, 2.1, 2.9, 41.0, 512.0, 580.0]])
    tensors = {
        "weight": weight,
        "weight_scale": torch.tensor([[1.0, 10.0, 100.0]]),
        "weight_g_idx": torch.tensor(GROUPS_OF_COLUMNS),
    }
    reader = CompressedTensorsCheckpoint({"config_groups": grouped(weights), "format": "dense"})
    expected = torch.tensor([[10.0, 2, 3, 40, 500, 600]])
    assert torch.equal(reader.read("layer", tensors).dequantize(), expected)


def test_a_layer_of_which_only_the_bias_is_stored_is_not_read():
    """A tied head, say: its matrix is the embedding's."""
    reader = CompressedTensorsCheckpoint({"config_groups": grouped(CHANNEL8), "format": "int-quantized"})
    assert reader.read("lm_head", {}) is None
    assert reader.read("lm_head", {"bias": torch.zeros(3)}) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_a_record_do_not_change_with_the_checkpoint_s(dtype):
    """float32 whatever is stored, contiguous, one row an output: kernels rely on it."""
    weights = {"num_bits": 8, "strategy": "tensor"}
    reader = CompressedTensorsCheckpoint({"config_groups": grouped(weights), "format": "int-quantized"})
    tensors = {"weight": torch.ones((3, 4), dtype=torch.int8), "weight_scale": torch.tensor(0.5, dtype=dtype)}
    record = reader.read("layer", tensors)
    assert record.scales.dtype == torch.float32
    assert record.scales.is_contiguous()
    assert torch.equal(record.scales, torch.full((3, 1), 0.5))


def test_zero_points_of_a_layer_with_few_outputs_are_unpacked():
    """One row of words, which the library itself cannot unpack (0.20.1): here 1, 2 and −8, each plus 8, in 4 bits."""
    weights = {"num_bits": 4, "strategy": "group", "group_size": 2, "symmetric": False}
    reader = CompressedTensorsCheckpoint({"config_groups": grouped(weights), "format": "pack-quantized"})
    tensors = {
        "weight_packed": torch.full((3, 1), 0x8888, dtype=torch.int32),
        "weight_shape": torch.tensor([3, 4]),
        "weight_scale": torch.ones(3, 2),
        "weight_zero_point": torch.tensor([[0x0A9, 0x09A]], dtype=torch.int32),
    }
    assert reader.read("layer", tensors).zero_points.tolist() == [[1, 2], [2, 1], [-8, -8]]
