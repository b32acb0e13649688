"""``quasar inspect``: what a quantizer makes of a model, in numbers that are those of the model itself."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from quasar.commands.cli import cli
from quasar.commands.inspect import inspect_model, tensor_bytes
from quasar.quantizers.w8a8.quantizer import W8A8Quantizer
from quasar.testing.models import tiny
from quasar.weights.linear import QuantizedLinear


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama whose output head shares the embedding's matrix."""
    path = tmp_path_factory.mktemp("model")
    tiny("llama", tie_word_embeddings=True).save_pretrained(path)
    return str(path)


def run(*arguments: str):
    return CliRunner().invoke(cli, ["inspect", *arguments])


@pytest.mark.parametrize("quantizer", ["w8a8", "hqq:bits=4,group=32", "hqq:bits=2,group=16,include=*.mlp.*"])
def test_the_json_has_every_layer_and_every_matrix_that_was_left_alone(folder, quantizer):
    """Names are those of the model, bytes those of the records, and no matrix is missing."""
    report = inspect_model(folder, quantizer=quantizer)
    assert json.loads(run("--model", folder, "--quantizer", quantizer, "--json").stdout) == json.loads(
        json.dumps(report)
    )
    assert list(report) == ["quantizer", "layers", "skipped", "full_bytes", "quantized_bytes"]
    model = tiny("llama", tie_word_embeddings=True)
    matrices = {name for name, parameter in model.named_parameters() if parameter.dim() == 2}
    listed = {f"{layer['name']}.weight" for layer in report["layers"]} | {part["name"] for part in report["skipped"]}
    assert listed - {"lm_head.weight"} == matrices
    assert all(0 < layer["error"] < 1 and layer["nbytes"] > 0 and layer["kernel"] for layer in report["layers"])
    saved = sum(4 * layer["shape"][0] * layer["shape"][1] - layer["nbytes"] for layer in report["layers"])
    assert report["full_bytes"] - report["quantized_bytes"] == saved


def test_a_shared_matrix_counts_once():
    """Tied: the embedding is not counted again as the head; a head that is quantized is one more."""
    tied, untied = tiny("llama", tie_word_embeddings=True), tiny("llama")
    assert tensor_bytes(untied) - tensor_bytes(tied) == 64 * 64 * 4
    quantized = W8A8Quantizer(lm_head=True).quantize(tied).model
    head = quantized.lm_head
    assert isinstance(head, QuantizedLinear)
    without = W8A8Quantizer().quantize(tied).model
    assert tensor_bytes(quantized) - tensor_bytes(without) == head.executor.weight.nbytes == 64 * 64 + 64 * 4


def test_errors_fall_with_the_bits(folder):
    """The report would show a quantizer that destroys a layer."""
    errors = [
        max(layer["error"] for layer in inspect_model(folder, quantizer=f"hqq:bits={bits},group=32")["layers"])
        for bits in (8, 4, 2)
    ]
    assert errors == sorted(errors)
    assert errors[0] < 0.02 < errors[2]


def test_the_table_is_for_people(folder):
    """Columns, reasons, and how much smaller the model is."""
    out = run("--model", folder, "--quantizer", "hqq:bits=4,group=32").stdout
    assert out.startswith("quantizer=hqq, bits=4, group=32")
    lines = [line.split() for line in out.splitlines()]
    assert ["NAME", "SHAPE", "BITS", "NBYTES", "KERNEL", "ERROR"] in lines
    assert any(line[:3] == ["model.layers.1.mlp.down_proj", "64×128", "4"] for line in lines)
    assert ["model.embed_tokens.weight", "embedding"] in lines
    assert "MB before" in out.splitlines()[-1]


def test_without_a_quantizer_nothing_is_quantized(folder):
    """An empty list, and not a byte less."""
    report = inspect_model(folder, quantizer="none")
    assert report["layers"] == []
    assert report["full_bytes"] == report["quantized_bytes"]
    assert "1.00 of it" in run("--model", folder, "--quantizer", "none").stdout


def test_nothing_of_the_process_is_changed(folder):
    """No global random state is used."""
    before = torch.get_rng_state()
    inspect_model(folder)
    assert torch.equal(torch.get_rng_state(), before)
