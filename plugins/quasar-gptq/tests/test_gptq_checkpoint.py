"""Reading GPTQ checkpoints: the packing of others' tools, both formats, orders of inputs, groups, and refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quasar.errors import InvalidRequestError, NumericalError
from quasar.testing.running import examples
from quasar_gptq.checkpoint import GptqFormat
from quasar_gptq.packing import unpack

quick = examples(60)


def pack(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """``[n, m]`` to ``[⌈n·bits / 32⌉, m]`` int32: each column as one long number, cut into words."""
    n_words = -(-len(integers) * bits // 32)
    columns = []
    for column in integers.T.tolist():
        number = sum(value << (bits * i) for i, value in enumerate(column))
        words = [number >> (32 * i) & 0xFFFFFFFF for i in range(n_words)]
        columns.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(columns, dtype=torch.int32).T


def stored(
    integers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, bits: int, g_idx: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """A layer as ``gptq_v2`` stores it: ``[in, out]`` integers, ``[groups, out]`` zeros and scales."""
    parts = {"qweight": pack(integers, bits), "qzeros": pack(zeros.T, bits).T.contiguous(), "scales": scales.half()}
    return parts if g_idx is None else {**parts, "g_idx": g_idx.int()}


def random_layer(bits: int, size: int, out: int, groups: int, seed: int):
    """Integers, zeros, and scales that float16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    integers, zeros = (torch.randint(0, 2**bits, (n, out), generator=generator) for n in (size, groups))
    return integers, zeros, torch.randint(1, 64, (groups, out), generator=generator) / 64


def config(bits: int = 4, group_size: int = 16, **more):
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, **more}


V2 = {"checkpoint_format": "gptq_v2"}

# What GPTQModel 7.7.0 packs (TorchLinear.pack_block) of 32 x 32 integers (7·in + 5·out) mod 2**bits, outputs 0 and 1,
# and of zero points (3·out + 1) mod 2**bits, which it packs without the offset of the first format.
OF_GPTQMODEL = {
    2: ([[1819044972, 1819044972], [-1313754703, -1313754703]], [-1313754703, -1313754703]),
    3: (
        [[-1205220424, -877123125, 701216809], [-438561563, 350608404, -602610212]],
        [-506702367, 1440861269, -866786868],
    ),
    4: (
        [[440163952, -1833642248, 440163952, -1833642248], [1870767045, -418829491, 1870767045, -418829491]],
        [1661839169, -343593015, 1661839169, -343593015],
    ),
    8: (
        [
            [353240832, 824845084, 1296449336, 1768053588, -2055309456, -1583705204, -1112100952, -640496700],
            [437455877, 909060129, 1380664381, 1852268633, -1971094411, -1499490159, -1027885907, -556281655],
        ],
        [168231937, 370348045, 572464153, 774580261, 976696369, 1178812477, 1380928585, 1583044693],
    ),
}


@pytest.mark.parametrize("bits", OF_GPTQMODEL)
def test_words_that_gptqmodel_packed_are_taken_apart(bits):
    """Also those of 3 bits, whose integers cross words."""
    weights, zeros = OF_GPTQMODEL[bits]
    steps = torch.arange(32)
    expected = torch.stack([steps * 7 % 2**bits, (steps * 7 + 5) % 2**bits], dim=1)
    assert torch.equal(unpack(torch.tensor(weights, dtype=torch.int32).T, bits).long(), expected)
    assert torch.equal(unpack(torch.tensor([zeros], dtype=torch.int32).T, bits)[:, 0].long(), (steps * 3 + 1) % 2**bits)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_layer_that_gptqmodel_packs_maps_back_to_what_it_maps_back_to(bits, monkeypatch):
    """With the library's own code on both sides."""
    monkeypatch.setenv("GPTQMODEL_DISABLE_PACK_EXT", "1")
    library = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
    integers, zeros, scales = random_layer(bits, 64, 32, 4, seed=bits)
    g_idx = torch.arange(64).roll(5) // 16
    linear = torch.nn.Linear(64, 32, bias=False)
    linear.weight.data = ((integers - zeros[g_idx]) * scales[g_idx]).T.contiguous()
    packed = library.TorchLinear(
        bits=bits, group_size=16, sym=False, desc_act=True, in_features=64, out_features=32, bias=False
    )
    packed.pack(linear, scales.T.contiguous(), zeros.T.float().contiguous(), g_idx.int())
    packed._init_wf_unsqueeze_buffers()
    packed.scales = packed.scales.float()  # in float16 it would round the products
    tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    record = GptqFormat(config(bits, desc_act=True, **V2)).read("x", tensors)
    assert torch.equal(record.dequantize(), packed.dequantize_weight().T.float())


@quick
@given(
    st.sampled_from([2, 3, 4, 8]),
    st.integers(1, 5),
    st.sampled_from([1, 7, 16, 32, 40]),
    st.integers(1, 70),
    st.booleans(),
    st.booleans(),
    st.integers(0, 999),
)
def test_layers_map_back_to_their_definition(bits, groups, group_size, out, first_format, with_g_idx, seed):
    """``(q − zero) · scale``, for any sizes, where words are not full too; the first format stores zeros less one."""
    size = groups * group_size
    integers, zeros, scales = random_layer(bits, size, out, groups, seed)
    g_idx = torch.arange(size) // group_size
    parts = stored(integers, (zeros - 1) % 2**bits if first_format else zeros, scales, bits, g_idx)
    if not with_g_idx:
        del parts["g_idx"]
    record = GptqFormat(config(bits, group_size, **({} if first_format else V2))).read("x", parts)
    assert torch.equal(record.dequantize(), ((integers - zeros[g_idx]) * scales[g_idx]).T)
    assert (record.bits, record.group_size, record.input_order) == (bits, group_size, None)
    assert int(record.values.min()) >= -(2 ** (bits - 1))
    assert int(record.values.max()) < 2 ** (bits - 1)


@quick
@given(st.lists(st.integers(0, 4), min_size=8, max_size=64), st.sampled_from([3, 4]), st.integers(0, 999))
def test_inputs_in_any_order_and_groups_of_any_size_are_read(g_idx, bits, seed):
    """Unsorted groups become an order; groups of unequal length become shorter ones that share scales."""
    integers, zeros, scales = random_layer(bits, len(g_idx), 6, 5, seed)
    groups = torch.tensor([*g_idx[:-1], 4])  # so that they are not all zero
    record = GptqFormat(config(bits, desc_act=True, **V2)).read("x", stored(integers, zeros, scales, bits, groups))
    assert torch.equal(record.dequantize(), ((integers - zeros[groups]) * scales[groups]).T)
    assert (record.input_order is None) == bool((groups.diff() >= 0).all())


def test_a_shuffled_order_of_equal_groups_keeps_their_length():
    """As desc_act makes it: nothing is cut smaller."""
    integers, zeros, scales = random_layer(4, 64, 8, 4, seed=1)
    groups = (torch.arange(64) // 16)[torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    record = GptqFormat(config(desc_act=True, **V2)).read("x", stored(integers, zeros, scales, 4, groups))
    assert record.group_size == 16
    assert record.input_order is not None


@pytest.mark.parametrize("g_idx", [None, torch.zeros(72)])
def test_without_an_order_groups_follow_from_their_size(g_idx):
    """No g_idx, or one of zeros, as some tools store it; the last group may be shorter."""
    integers, zeros, scales = random_layer(4, 72, 8, 3, seed=2)
    groups = torch.arange(72) // 32
    record = GptqFormat(config(4, 32, **V2)).read("x", stored(integers, zeros, scales, 4, g_idx))
    assert torch.equal(record.dequantize(), ((integers - zeros[groups]) * scales[groups]).T)
    assert record.group_size == 8


def test_one_group_for_a_whole_row():
    """``group_size: -1``, with a g_idx of zeros and without one."""
    integers, zeros, scales = random_layer(3, 32, 8, 1, seed=3)
    for g_idx in (None, torch.zeros(32)):
        record = GptqFormat(config(3, -1, **V2)).read("x", stored(integers, zeros, scales, 3, g_idx))
        assert torch.equal(record.dequantize(), ((integers - zeros) * scales).T)
        assert record.scales.shape == (8, 1)


def test_a_symmetric_layer_has_no_zero_points():
    """Its stored zero is half the range (8 of 16), and 7 in the first format."""
    integers, _, scales = random_layer(4, 32, 8, 2, seed=4)
    for zero, more in ((8, V2), (7, {})):
        record = GptqFormat(config(**more)).read("x", stored(integers, torch.full((2, 8), zero), scales, 4))
        assert record.zero_points is None
        assert torch.equal(record.values, (integers.T - 8).to(torch.int8))


def test_what_is_not_stored_as_integers_is_stored_in_full():
    """The head, usually, and what ``modules_in_block_to_quantize`` does not name."""
    assert GptqFormat(config()).read("lm_head", {"weight": torch.ones(4, 4), "bias": torch.ones(4)}) is None


def test_rules_for_single_layers_are_followed_in_their_order():
    """``dynamic`` of GPTQModel: the first pattern that matches from the beginning of the name, with or without +:."""
    rules = {
        r"-:.*\.9\..*": {},
        r"+:.*\.3\..*down": {"bits": 8, "group_size": 32},
        r"model\.3": {"bits": 2},
        r"3": {"bits": 3},
    }
    form = GptqFormat(config(4, 16, dynamic=rules, **V2))
    for name, bits, group in (("model.3.down", 8, 32), ("model.3.up", 2, 16), ("model.4.up", 4, 16)):
        integers, zeros, scales = random_layer(bits, 64, 8, 64 // group, seed=5)
        record = form.read(name, stored(integers, zeros, scales, bits))
        assert (record.bits, record.group_size) == (bits, group), name
    assert form.read("model.9.up", {"weight": torch.ones(4, 4)}) is None
    with pytest.raises(InvalidRequestError, match=r"model.9.up is stored quantized, though 'dynamic'"):
        form.read("model.9.up", stored(integers, zeros, scales, 4))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"bits": 5}, "bits=5, expected one of 2, 3, 4, 8"),
        ({"bits": None}, "bits=None"),
        ({"group_size": 0}, "group_size=0, expected a positive integer, or -1"),
        ({"checkpoint_format": "marlin"}, "GPTQ: format='marlin', expected one of gptq, gptq_v2"),
        ({"format": "gptq_p"}, "GPTQ: format='gptq_p', expected one of gptq, gptq_v2"),
        ({"is_marlin_format": True}, "GPTQ: format='marlin', expected one of"),
        ({"pack_dtype": "int16"}, "GPTQ: pack_dtype='int16', expected int32"),
        ({"rotation": "hadamard"}, "rotation='hadamard' is not read; it changes the model"),
        ({"activation": {"mode": "w4a8"}}, "activation=.* is not read"),
        ({"dynamic": {"(": {}}}, r"'dynamic' of the checkpoint has the pattern '\('"),
    ],
)
def test_configurations_that_are_not_read_are_refused_by_name(more, message):
    """Before any file is read."""
    with pytest.raises(InvalidRequestError, match=message):
        GptqFormat({**config(), **more})


def without(part):
    return lambda parts: {name: tensor for name, tensor in parts.items() if name != part}


def with_(part, change):
    return lambda parts: {**parts, part: change(parts[part])}


@pytest.mark.parametrize(
    ("damage", "more", "error", "message"),
    [
        (without("qzeros"), {}, InvalidRequestError, "x is stored with a qweight but without qzeros"),
        (without("scales"), {}, InvalidRequestError, "without scales"),
        (without("g_idx"), {"desc_act": True}, InvalidRequestError, "no g_idx that orders its inputs"),
        (with_("g_idx", torch.zeros_like), {"desc_act": True}, InvalidRequestError, "no g_idx that orders its inputs"),
        (with_("g_idx", lambda t: t + 1), {}, InvalidRequestError, "x.g_idx names groups outside 0…3"),
        (with_("g_idx", lambda t: t - 1), {}, InvalidRequestError, "x.g_idx names groups outside 0…3"),
        (with_("g_idx", lambda t: t[:8]), {}, InvalidRequestError, "x.qweight has 8 words for 8 inputs, expected 1"),
        (without(""), {"bits": 8}, InvalidRequestError, "x.qzeros has 5 words for 40 outputs, expected 10 with 8 bits"),
        (without(""), {"bits": 2}, InvalidRequestError, "x.qzeros has 5 words .* is 'bits' of the configuration right"),
        (without("g_idx"), {"group_size": 32}, InvalidRequestError, "has 4 groups, expected 2 of 32 for 64 inputs"),
        (with_("scales", lambda t: t[:3]), {}, InvalidRequestError, r"x.scales is \[3, 40\], expected \[4, 40\]"),
        (with_("qweight", lambda t: t.short()), {}, InvalidRequestError, "x.qweight is torch.int16, expected words"),
        (with_("qzeros", lambda t: t.float()), {}, InvalidRequestError, "x.qzeros is torch.float32"),
        (with_("scales", lambda t: t.fill_(float("nan"))), {}, NumericalError, "x.scales has values that are not fin"),
    ],
)
def test_layers_that_do_not_fit_are_refused_by_name(damage, more, error, message):
    """With what was found and what was expected."""
    integers, zeros, scales = random_layer(4, 64, 40, 4, seed=6)
    parts = damage(stored(integers, zeros, scales, 4, torch.arange(64) // 16))
    with pytest.raises(error, match=message):
        GptqFormat({**config(4, 16), **more}).read("x", parts)
