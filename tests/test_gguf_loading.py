"""What a ``.gguf`` file declares and stores is what the model computes with, and the file is read once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM, AutoTokenizer

from gguf_files import apart, write_gguf
from quasar.checkpoints.models import load_model
from quasar.errors import CheckpointError, InvalidRequestError, ModelNotFoundError
from quasar.pipeline.pipeline import Pipeline
from quasar.quantizers.gguf import reader as gguf_reader
from quasar.testing.models import random_prompt, tiny

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def written(path: Path, declare: Callable[[GGUFWriter], None] = lambda writer: None, **options) -> str:
    return str(write_gguf(path, tiny("llama", **{"num_hidden_layers": 1, **options}), lambda name: "F32", declare))


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model(input_ids=torch.tensor([random_prompt(48)])).logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_are_those_that_transformers_loads_bit_for_bit(tmp_path, family, dtype):
    """Configuration, ends and tokenizer too."""
    options = {"n_inner": 256, "max_position_embeddings": 1024} if family == "gpt2" else {}
    path = write_gguf(tmp_path / "a.gguf", tiny(family, tie_word_embeddings=True, **options), lambda name: "Q5_1")
    where = {"pretrained_model_name_or_path": str(tmp_path), "gguf_file": path.name}
    expected = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype)
    loaded = load_model(str(path), dtype=dtype)
    assert loaded.model.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    assert loaded.model.config.to_dict() == expected.config.to_dict()
    assert loaded.model.generation_config.to_dict() == expected.generation_config.to_dict()
    assert loaded.tokenizer.get_vocab() == AutoTokenizer.from_pretrained(**where).get_vocab()


def test_the_metadata_are_read_once(tmp_path, monkeypatch):
    """By one reader, which transformers gets as well; afterwards it has its own again."""
    path, opened = written(tmp_path / "once.gguf"), []
    plain, original = gguf.GGUFReader, gguf.GGUFReader.__init__
    monkeypatch.setattr(plain, "__init__", lambda self, path: opened.append(path) or original(self, path))
    load_model(path)
    assert opened == [Path(path)]
    assert gguf.GGUFReader is plain


def test_the_fast_reader_reads_what_the_package_reads(tmp_path):
    """Keys of every kind, and tensors."""

    def declare(writer: GGUFWriter) -> None:
        writer.add_array("tiny.names", ["a", "", "ünder"])
        writer.add_array("tiny.numbers", [1, -2, 3])
        writer.add_array("tiny.fractions", [0.5, 2.0])
        writer.add_array("tiny.truths", [True, False])
        writer.add_bool("tiny.truth", True)

    path = written(tmp_path / "kinds.gguf", declare)
    expected, found = gguf.GGUFReader(path), gguf_reader.FastReader(path)
    assert {key: field.contents() for key, field in found.fields.items()} == {
        key: field.contents() for key, field in expected.fields.items()
    }
    assert [(t.name, t.tensor_type, t.shape.tolist(), t.data.tobytes()) for t in found.tensors] == [
        (t.name, t.tensor_type, t.shape.tolist(), t.data.tobytes()) for t in expected.tensors
    ]


def _linear(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def _yarn(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


def _llama3(writer: GGUFWriter) -> None:
    """As llama.cpp's converter computes the tensor from the numbers of a configuration."""
    divisors = []
    for wave in 2 * np.pi * 10_000.0 ** (np.arange(0, 16, 2) / 16):
        if wave < 8192 / 4.0:
            divisors.append(1.0)
        elif wave > 8192 / 1.0:
            divisors.append(8.0)
        else:
            smooth = (8192 / wave - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / 8.0 + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))


@pytest.mark.parametrize(
    ("declare", "scaling"), [(_linear, LINEAR), (_yarn, YARN), (_llama3, LLAMA3)], ids=["linear", "yarn", "llama3"]
)
def test_scaled_positions_are_honoured(tmp_path, declare, scaling):
    """As by the same model with the scaling in its configuration; without, the logits are far from it."""
    rope = {"rope_theta": 10_000.0, **scaling}
    expected = tiny("llama", num_hidden_layers=1, rope_parameters=rope)
    loaded = load_model(str(write_gguf(tmp_path / "scaled.gguf", expected, lambda name: "F32", declare)))
    assert apart(logits_of(loaded.model), logits_of(expected)) < 1e-5
    if scaling is not LLAMA3:  # whose long waves hardly turn in so few positions
        assert apart(logits_of(load_model(written(tmp_path / "plain.gguf")).model), logits_of(expected)) > 1e-3


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "llama.rope.scaling.type='longrope'"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.linspace(1, 3, 8, dtype=np.float32)), "stores rope_freqs.wei"),
        (lambda w: w.add_logit_scale(0.5), "declares llama.logit_scale=0.5, which transformers does not take over"),
        (lambda w: w.add_string("llama.novelty", "yes"), "declares llama.novelty='yes'"),
        (lambda w: w.add_sliding_window(16), "declares llama.attention.sliding_window=16"),
        (lambda w: w.add_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32)), "stores blk.0.attn_sinks.weight"),
        (lambda w: w.add_uint16("split.count", 2), "is part 1 of 2 of a split model .*llama-gguf-split --merge"),
    ],
)
def test_what_cannot_be_taken_over_is_refused_by_its_name(tmp_path, declare, message):
    """Keys and tensors: nothing that would change the logits is left out without a word."""
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(written(tmp_path / "declared.gguf", declare))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "declare",
    [
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.NONE),
        lambda w: w.add_logit_scale(1.0),
        lambda w: w.add_sliding_window(1_000_000),
        lambda w: w.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32)),
        lambda w: w.add_uint16("split.count", 1),
    ],
)
def test_what_changes_nothing_is_no_reason_to_refuse(tmp_path, declare):
    plain = load_model(written(tmp_path / "plain.gguf"))
    declared = load_model(written(tmp_path / "declared.gguf", declare))
    assert torch.equal(logits_of(plain.model), logits_of(declared.model))


def test_positions_that_turn_a_part_of_a_head_are_refused_where_the_model_turns_all(tmp_path):
    model, path = tiny("qwen2", num_hidden_layers=1), tmp_path / "partial.gguf"
    assert load_model(str(write_gguf(path, model, lambda name: "F32", lambda w: w.add_rope_dimension_count(16))))
    write_gguf(path, model, lambda name: "F32", lambda w: w.add_rope_dimension_count(8))
    with pytest.raises(CheckpointError, match=r"declares qwen2\.rope\.dimension_count=8, .* Qwen2Config turns 16"):
        load_model(str(path))


def test_the_end_of_a_turn_ends_the_output(tmp_path):
    """Both it and the end of a text do, in the model that is loaded and in one that is saved and loaded again."""

    def declare(writer: GGUFWriter) -> None:
        writer.add_eot_token_id(5)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 6)

    path = written(tmp_path / "turns.gguf", declare)
    model = load_model(path).model
    assert model.generation_config.eos_token_id == [2, 5, 6]
    with torch.no_grad():
        model.lm_head.weight.zero_()
    forced = Pipeline.from_model(model, quantizer="none")
    result = forced.generate_ids([7, 8], max_new_tokens=9, logits_processors=[_only(5)])
    assert (list(result.token_ids), result.finish_reason) == ([5], "eos")


def _only(token: int):
    def process(token_ids, scores):
        scores = torch.full_like(scores, -100.0)
        scores[..., token] = 0.0
        return scores

    return process


def test_a_file_of_something_else_is_refused_in_one_line(tmp_path):
    (tmp_path / "junk.gguf").write_bytes(b"GGUF" + bytes(range(200)))
    with pytest.raises(ModelNotFoundError, match=r"junk\.gguf cannot be read as a GGUF file"):
        load_model(str(tmp_path / "junk.gguf"))
    with pytest.raises(InvalidRequestError, match="cannot be read as a GGUF file"):
        gguf_reader.open_gguf(tmp_path / "junk.gguf")
