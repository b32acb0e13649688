"""The checkpoint format: unpacked as AutoAWQ packs, and refused with one clear line where it does not fit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quasar.errors import InvalidRequestError, NumericalError
from quasar_awq.checkpoint import AwqFormat

# What WQLinear_GEMM, WQLinear_GEMV and WQLinear_GEMVFast of AutoAWQ 0.2.9 (awq/modules/linear) make in `from_linear` of
# the layers below: `qweight`, and `qzeros` without its padding in gemv_fast; little-endian bytes.
PACKED = {
    "gemm": (
        "e0cd6735ab7812f05624cdab01ef7956ec1075a84386dc0fb9ec42751043a8dcfa83952d0c95b63f2eb6c8514fc8e9721af8"
        "c5b4e6c59280a3926f4d706e3c1a",
        "9076f41e5c32385218fe7c96d4bab0daa187052f6d434963290f8da7e5cbc1eb",
    ),
    "gemv": (
        "c0aaca2ee8e648e0cc0e846e8ee2acaa0ca480c2482242a6606ec06844860ce65755a74e2a5bd1abca2ed7d527ceaadb512b"
        "4aae5755a74e2a5bd1abca2ed7d5ee1f845e6dc07966b84f2a5bc09aa90cb5a2f48b66970cd6e548f1ee30c7a2d376c9716e"
        "af360131a66f7ec17966a73e0939ae6776c9716eaf360131a66f7ec10d835e7ee2aba9fc9480c1471232a66f6db05844850b"
        "d6f66a2321741c0849cf854d4b8d250141c781a105cdcb0da581c1470121854d4b8d250141c781a105cd1cf828ad6776da82"
        "8fc1583464e9a3b216cecb0d9470a025effe520a0749d0bca3b205bdaaeb724d7de2abba0db5a2e37a4575eaa3b205bdaaeb"
        "724d7de2abba",
        "1000000000000000000000000000000054000000000000000000000000000000a90000000000000000000000000000000f00"
        "000000000000000000000000000076000000000000000000000000000000fe00000000000000000000000000000087000000"
        "00000000000000000000000021000000000000000000000000000000",
    ),
    "gemv_fast": (
        "80ecec8c6a2eeae08ac44ca80eaee2a68c404046246e2a8620c0480c6268ace6a77a252cb5ee55c217a7daadbeb5a4dd71aa"
        "55c25beb52257a71a4ddee5b4adade086ecb0fafc194949a78a26ecb650565056b3e72789ac4c4210faf6b3ed8def696a77a"
        "696f3c66117e07a71ee1363c696f70aa99f6c3631ee17a70e71166c3468080ecca6a26ea848a024ca20e42e2ec8c8c402e24"
        "e02ac420a848ae62a6ac17a75225beb52c55aa174adaebbeada47a712c55ee5bc252a77aada4b5eedd4ad8de346ea20f21c1"
        "c1947278346e08650865cb6baf72949a9ac4a20fcb6b05d899f607a79669363ce711aa077e1e633696697a706f9966c37e1e"
        "a77ae1e73c662d24e019b320a8389e61a5accef7f7645dca8616b0830b026891d54264f4f4c755b128c81dd1040a1b5544a0"
        "7d1dc88c51158c82d71144a0b1514004d1d782cc7c4f616868917feca838d2a52d248ab3467f910e0e9e7c4f0b02acd55dca"
        "20b0a3ddaa07b252ebbe252b70aadd3a4beb3adaa77a252bb4ee55b207a7daadbeb45a2de9e08ab33ba80e9ed2a5c7cecef7"
        "245d198620b0380b6168acd5f76464f41b55cc287d1d4004151b0a44117d28c8b151c88cd1d70a4455b1a0401dd18c82ec7c"
        "9e616168467f3ba842d25a2d838a4f466891910eec7c380ba5ac245db320ada370aa55b24beb52257a70a3ddee4bdd3a07a7"
        "5225beb42b55aa073adaebbe",
        "008000bcc0c280c780c300bf00bf00b600b600c140c6008000bfa0c500c400bd",
    ),
}
SHAPES = {"gemm": (32, 4, 2), "gemv": (8, 64, 32), "gemv_fast": (8, 128, 64)}
"""Outputs, inputs, group."""


def integers(version: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers, zero points and scales of the layers that were packed; scales are exact in float16."""
    out, size, group = SHAPES[version]
    o, i, g = torch.arange(out).unsqueeze(1), torch.arange(size), torch.arange(size // group)
    values = (37 * o + 61 * i + 7 * o * i + 3 * i * i) // 5 % 16
    return values, (7 * o + 3 * g + o * o) // 2 % 16, (1 + (o + 2 * g) % 5) / 8


def weight_of(version: str) -> torch.Tensor:
    """``[out, in]``, what the layer was before it was packed."""
    values, zeros, scales = integers(version)
    group = SHAPES[version][2]
    return (values - zeros.repeat_interleave(group, 1)) * scales.repeat_interleave(group, 1)


def stored(version: str) -> dict[str, torch.Tensor]:
    """The tensors as they lie in a checkpoint."""
    out, size, _ = SHAPES[version]
    qweight, qzeros = (bytearray.fromhex(text) for text in PACKED[version])
    scales = integers(version)[2].half()
    if version == "gemm":
        rows, zeros, scales = size, torch.frombuffer(qzeros, dtype=torch.int32).reshape(-1, out // 8), scales.T
    elif version == "gemv":
        rows, zeros = out, torch.frombuffer(qzeros, dtype=torch.int32).reshape(out, 4)
        scales = torch.nn.functional.pad(scales, (0, 30))
    else:
        rows, zeros = out // 4, torch.frombuffer(qzeros, dtype=torch.float16).reshape(-1, out)
        zeros, scales = (torch.nn.functional.pad(t, (0, 0, 0, 14)) for t in (zeros, scales.T))
    dtype = torch.int16 if version == "gemv_fast" else torch.int32
    return {
        "qweight": torch.frombuffer(qweight, dtype=dtype).reshape(rows, -1),
        "qzeros": zeros,
        "scales": scales.contiguous(),
        "bias": torch.zeros(out),
    }


def format_of(version: str, **config) -> AwqFormat:
    return AwqFormat({"version": version, "bits": 4, "group_size": SHAPES.get(version, (0, 0, 128))[2], **config})


@pytest.mark.parametrize("version", SHAPES)
def test_a_layer_maps_back_to_what_the_library_packed(version):
    """To the bit, for the integers, the zero points and the scales were chosen to be exact."""
    record = format_of(version).read("layer", stored(version))
    assert torch.equal(record.dequantize(), weight_of(version))
    assert (record.bits, record.group_size, record.activations) == (4, SHAPES[version][2], "none")


@pytest.mark.parametrize("version", SHAPES)
def test_the_record_holds_integers_of_four_bits_and_their_zero_points(version):
    """Moved down by 8 both, so that an exporter finds what was stored."""
    values, zeros, scales = integers(version)
    record = format_of(version).read("layer", stored(version))
    assert torch.equal(record.values, (values - 8).to(torch.int8))
    assert torch.equal(record.zero_points, zeros - 8.0)
    assert torch.equal(record.scales, scales.float())


@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 3, 8]), st.integers(0, 999))
def test_gemm_packs_eight_columns_in_this_order(blocks, groups, length, seed):
    """Four bits from the lowest on hold columns 0, 2, 4, 6, 1, 3, 5, 7; any shape, and the whole row as a group."""
    generator = torch.Generator().manual_seed(seed)
    size, out = groups * length, 8 * blocks
    values = torch.randint(0, 16, (size, out), generator=generator)
    zeros = torch.randint(0, 16, (groups, out), generator=generator)
    scales = torch.rand((groups, out), generator=generator)

    def packed(rows):
        words = [
            sum(int(row[8 * b + column]) << 4 * i for i, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
            for row in rows
            for b in range(blocks)
        ]
        return torch.tensor([word - 2**32 if word >= 2**31 else word for word in words]).int().reshape(-1, blocks)

    form = AwqFormat({"version": "GEMM", "bits": 4, "group_size": -1 if groups == 1 else length})
    record = form.read("layer", {"qweight": packed(values), "qzeros": packed(zeros), "scales": scales})
    expected = (values - zeros.repeat_interleave(length, 0)) * scales.repeat_interleave(length, 0)
    assert torch.equal(record.dequantize(), expected.T)


@pytest.mark.parametrize("version", SHAPES)
def test_a_module_that_was_not_converted_is_stored_in_full(version):
    """What is stored decides: the list ``modules_to_not_convert`` may name a module by a part of its name."""
    form = format_of(version, modules_to_not_convert=["mlp.gate"])
    assert form.read("model.layers.0.mlp.gate", {"weight": torch.ones(8, 64)}) is None
    assert form.read("model.norm", {}) is None


def test_the_older_names_of_the_options_are_understood():
    """As in the file ``quant_config.json``; the version is ``gemm`` where none is given."""
    record = AwqFormat({"w_bit": 4, "q_group_size": 2, "zero_point": True}).read("layer", stored("gemm"))
    assert torch.equal(record.dequantize(), weight_of("gemm"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"version": "marlin"}, "awq: version='marlin', expected one of gemm, gemv, gemv_fast"),
        ({"version": "gemm", "backend": "llm-awq"}, "awq: version='llm-awq', expected one of"),
        ({"bits": 8}, "awq: bits=8, expected 4"),
        ({"w_bit": 3}, "awq: bits=3, expected 4"),
        ({"group_size": 0}, "group_size=0, expected a positive integer"),
        ({"group_size": "128"}, "group_size='128', expected a positive integer"),
    ],
)
def test_a_format_that_is_not_known_is_refused_at_the_start(config, message):
    """With what would do."""
    with pytest.raises(InvalidRequestError, match=message):
        AwqFormat(config)


def changed(version: str, part: str, change) -> dict[str, torch.Tensor]:
    tensors = stored(version)
    return {**tensors, part: change(tensors[part])}


@pytest.mark.parametrize(
    ("version", "part", "change", "message"),
    [
        ("gemm", "qweight", lambda t: t[:3], r"gemm: layer x.up: group_size=2 does not divide its 3 inputs"),
        ("gemm", "qweight", lambda t: t.long(), r"qweight is \[4, 4\] of int64, expected \[any, any\] of int32"),
        ("gemm", "qzeros", lambda t: t[:1], r"qzeros is \[1, 4\] of int32, expected \[2, 4\] of int32"),
        ("gemm", "scales", lambda t: t.T, r"scales is \[32, 2\] of float16, expected \[2, 32\] of float16 or "),
        ("gemv", "qweight", lambda t: t[:4], r"qzeros is \[8, 4\] of int32, expected \[4, 1\] of int32"),
        ("gemv", "scales", lambda t: t[:, :1], r"scales is \[8, 1\] of float16, expected \[8, 2\]"),
        ("gemv", "qzeros", lambda t: t[0], r"qzeros is \[4\] of int32"),
        ("gemv_fast", "qweight", lambda t: t[:, :96], r"qweight has 96 columns, expected a multiple of 64"),
        ("gemv_fast", "qweight", lambda t: t.int(), r"qweight is \[2, 128\] of int32, expected .* of int16"),
        ("gemv_fast", "scales", lambda t: t[:1], r"scales is \[1, 8\] of float16, expected \[2, 8\]"),
        ("gemv_fast", "qzeros", lambda t: t.int(), r"qzeros is \[16, 8\] of int32, expected \[2, 8\] of float16 or "),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(version, part, change, message):
    """Layer, tensor, what it is and what was expected."""
    with pytest.raises(InvalidRequestError, match=message):
        format_of(version).read("x.up", changed(version, part, change))


def test_a_layer_of_which_a_part_is_missing_is_refused():
    """It is not taken for one that is stored in full."""
    tensors = {part: tensor for part, tensor in stored("gemm").items() if part != "qzeros"}
    with pytest.raises(InvalidRequestError, match=r"layer x.up has no qzeros, but bias, qweight, scales"):
        format_of("gemm").read("x.up", tensors)


@pytest.mark.parametrize("version", SHAPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_refused_by_name(version, value):
    """Before it makes an output that is not a number."""
    tensors = stored(version)
    tensors["scales"][0, 0] = value
    with pytest.raises(NumericalError, match=r"x\.up\.scales has values that are not finite"):
        format_of(version).read("x.up", tensors)


def test_a_group_whose_scale_is_zero_is_a_group_of_zeros():
    """gemv_fast stores scale times zero point, of which the zero point cannot be had back then."""
    tensors = stored("gemv_fast")
    tensors["scales"][0, 0] = tensors["qzeros"][0, 0] = 0
    record = format_of("gemv_fast").read("layer", tensors)
    assert torch.equal(record.dequantize()[0, :64], torch.zeros(64))
    assert torch.equal(record.dequantize()[0, 64:], weight_of("gemv_fast")[0, 64:])
