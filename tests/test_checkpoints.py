"""Quantized models in files: saved and loaded they are the same model, and what is damaged is refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file, save_file

from quasar import Pipeline
from quasar.checkpoints import loading
from quasar.checkpoints.models import load_model
from quasar.checkpoints.own import description_checksum
from quasar.checkpoints.packing import pack, unpack
from quasar.checkpoints.saving import save_quantized
from quasar.commands.cli import cli
from quasar.commands.inspect import inspect_model, tensor_bytes
from quasar.errors import CheckpointError, InvalidRequestError, ModelNotFoundError, UnsupportedModelError
from quasar.quantizers.hqq import HqqQuantizer
from quasar.quantizers.w8a8.quantizer import W8A8Quantizer
from quasar.registry.plugins import Entry, LoadedPlugin, Origin, load_plugins
from quasar.registry.registry import Registry, default_registry
from quasar.testing.models import random_prompt, tiny
from quasar.weights.linear import QuantizedLinear, quantized_layers
from quasar.weights.record import QuantizedWeight

CALIBRATION = [torch.tensor([random_prompt(24, seed=s)]) for s in (1, 2)]
QUANTIZERS = {
    "w8a8": W8A8Quantizer,
    "w8a8 with its head": lambda: W8A8Quantizer(lm_head=True),
    "hqq of 4 bits": lambda: HqqQuantizer(bits=4, group=32),
    "hqq of 3 bits, some layers": lambda: HqqQuantizer(bits=3, group=16, exclude="*.0.*"),
    "hqq of 2 bits with its head": lambda: HqqQuantizer(bits=2, group=16, lm_head=True),
    "w8a8 shifted, in groups": lambda: W8A8Quantizer(group=16, smooth="shift"),
    "w8a8 with fixed scales": lambda: W8A8Quantizer(activations="static"),
    "the oracle's kernel": lambda: W8A8Quantizer(kernel="reference"),
}


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.tensor([random_prompt(20, seed=4)])).logits


def saved(folder, model, quantizer=None, **options):
    quantizer = quantizer or W8A8Quantizer(**options)
    made = quantizer.quantize(model, CALIBRATION)
    quantized = made.model
    save_quantized(folder, quantized, description=made.report)
    return quantized


def edit_json(path, change):
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


@given(
    arrays("int8", st.tuples(st.integers(1, 6), st.integers(1, 19)), elements=st.integers(-128, 127))
    | arrays("int8", (3, 7), elements=st.integers(120, 127))
    | arrays("int8", (3, 9), elements=st.integers(-128, -126))
)
def test_packing_loses_nothing(values):
    """Any integers, any number of columns; a range of up to 16 takes half a byte each, of up to 4 a quarter."""
    values = torch.from_numpy(values)
    stored, packing = pack(values)
    assert torch.equal(unpack(stored, **packing), values)
    span = int(values.max()) - int(values.min())
    assert packing["packed"] == (2 if span < 4 else 4 if span < 16 else 8)
    assert stored.shape[1] == -(-values.shape[1] * packing["packed"] // 8)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "opt", "gemma3", "phi3", "mixtral", "falcon_alibi"])
@pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
def test_a_saved_model_is_loaded_bit_by_bit(tmp_path, family, quantizer):
    """Logits, every record, bytes, and no key missing; whether the head shares the embedding's matrix or not."""
    model = tiny(family, tie_word_embeddings=family in ("llama", "gpt2"))
    quantized = saved(tmp_path, model, quantizer())
    loaded = load_model(str(tmp_path)).model
    assert torch.equal(logits(loaded), logits(quantized))
    layers = quantized_layers(loaded)
    assert layers.keys() == quantized_layers(quantized).keys()
    for name, layer in quantized_layers(quantized).items():
        assert layers[name].kernel == layer.kernel
        record, expected = layers[name].executor.weight, layer.executor.weight
        for part, tensor in expected.tensors().items():
            assert torch.equal(record.tensors()[part], tensor), (name, part)
        assert (record.bits, record.activations) == (expected.bits, expected.activations)
    assert loaded.state_dict().keys() == quantized.state_dict().keys()
    assert tensor_bytes(loaded) == tensor_bytes(quantized)
    assert not loaded.training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_is_that_of_the_saved_model(tmp_path, dtype):
    """Unless another is asked for."""
    quantized = saved(tmp_path, tiny("qwen2", dtype=dtype))
    loaded = load_model(str(tmp_path)).model
    assert loaded.dtype == dtype
    assert torch.equal(logits(loaded), logits(quantized))
    assert logits(load_model(str(tmp_path), dtype="float32").model).dtype == torch.float32


FRESH = """
import sys, torch
from quasar.checkpoints.models import load_model
from quasar.testing.models import random_prompt
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    model = load_model(folder).model
    torch.save(model(input_ids=torch.tensor([random_prompt(20, seed=4)])).logits.detach(), f"{folder}/out")
"""


def test_a_fresh_process_computes_the_same_bits(tmp_path):
    """With biases, which differ from zero."""
    quantized = {}
    for family in ("qwen2", "opt"):
        model = tiny(family)
        assert any("bias" in name and parameter.abs().max() > 0 for name, parameter in model.named_parameters())
        quantized[tmp_path / family] = saved(tmp_path / family, model, lm_head=True)
    subprocess.run([sys.executable, "-c", FRESH, *map(str, quantized)], check=True)
    for folder, model in quantized.items():
        assert torch.equal(torch.load(folder / "out"), logits(model)), folder.name


def test_a_tied_head_is_stored_once_and_a_quantized_one_stays_apart(tmp_path):
    """And ``tie_weights`` changes neither."""
    model = tiny("llama", tie_word_embeddings=True)
    saved(tmp_path / "tied", model)
    tied = load_model(str(tmp_path / "tied")).model
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    quantized = saved(tmp_path / "apart", model, lm_head=True)
    apart = load_model(str(tmp_path / "apart")).model
    apart.tie_weights()
    assert isinstance(apart.lm_head, QuantizedLinear)
    assert torch.equal(apart.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert torch.equal(logits(apart), logits(quantized))


def test_the_description_has_versions_options_and_layers(tmp_path):
    """For a reader, and for whoever loads it years later."""
    saved(tmp_path, tiny("llama"), alpha=0.25)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    description = config["quantization_config"]
    assert (description["quant_method"], description["version"]) == ("quasar", 1)
    assert description["versions"].keys() == {"quasar", "torch", "transformers"}
    assert description["quantizer"]["alpha"] == 0.25
    assert description["layers"]["model.layers.0.mlp.up_proj"]["bits"] == 8
    assert not list(tmp_path.glob("*.bin"))


def test_a_named_kernel_executes_the_loaded_model_too(tmp_path):
    """And one that is not there any more is named."""
    saved(tmp_path, tiny("llama"), kernel="reference")
    layers = quantized_layers(load_model(str(tmp_path)).model).values()
    assert {layer.kernel for layer in layers} == {"reference"}
    change_description(lambda description: description.update(kernel="gone"))(tmp_path)
    with pytest.raises(InvalidRequestError, match="no kernel named 'gone'"):
        load_model(str(tmp_path))


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 16
    path.write_bytes(content)


def change_tensors(change):
    def changed(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return changed


def change_description(change, *, signed=True):
    def changed(config):
        description = config["quantization_config"]
        change(description)
        if signed:
            description["checksum"] = description_checksum(description)

    return lambda folder: edit_json(folder / "config.json", changed)


def replace_weights_by_a_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


UP = "model.layers.0.mlp.up_proj"
DAMAGES = {
    "cut off": (truncate, "model.safetensors is damaged, or no safetensors file"),
    "one bit": (flip_a_bit, r"\S+ is damaged: its checksum is not the one in the description"),
    "text": (lambda folder: (folder / "model.safetensors").write_text("no"), "is damaged, or no safetensors file"),
    "no file": (lambda folder: (folder / "model.safetensors").unlink(), r"there is no file \S+model.safetensors"),
    "a pickle": (replace_weights_by_a_pickle, "pytorch_model.bin would be a pickle"),
    "a tensor less": (change_tensors(lambda tensors: tensors.pop(f"{UP}.scales")), f"{UP}.scales is missing"),
    "a norm less": (change_tensors(lambda tensors: tensors.pop("model.norm.weight")), "model.norm.weight is missing"),
    "a tensor more": (change_tensors(lambda t: t.update(extra=torch.ones(1))), "extra is stored, but not in the descr"),
    "a description": (change_description(lambda d: d["layers"].pop(UP), signed=False), "is damaged or was edited"),
    "a layer not described": (change_description(lambda d: d["layers"].pop(UP)), f"the model has no {UP}"),
    "a layer too many": (
        change_description(lambda d: d["layers"].update(nowhere=d["layers"][UP])),
        "the model has no linear layer nowhere, which the checkpoint describes",
    ),
    "another rounding": (
        change_description(lambda d: d["layers"][UP].update(activations="int8")),
        "activations='int8'",
    ),
    "17 bits": (change_description(lambda d: d["layers"][UP].update(bits=17)), "bits=17, expected an integer from 1"),
    "a list": (change_description(lambda d: d.update(shared=[1])), "is not what it says: AttributeError"),
    "other bits": (change_description(lambda d: d["layers"][UP].update(packed=5)), f"layer {UP} is not stored as"),
    "no bits": (change_description(lambda d: d["layers"][UP].pop("bits")), f"layer {UP} is not stored as"),
    "another version": (change_description(lambda d: d.update(version=2)), "version 2 .* reads version 1"),
    "no layers": (change_description(lambda d: d.pop("layers"), signed=False), "is damaged or was edited"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), r"config.json cannot be read"),
    "a JSON list": (lambda folder: (folder / "config.json").write_text("[]"), "expected a JSON object"),
    "another model": (
        lambda folder: edit_json(folder / "config.json", lambda config: config.update(intermediate_size=64)),
        "stored as .* the model has",
    ),
    "no causal LM": (
        lambda folder: edit_json(folder / "config.json", lambda config: config.update(model_type="nothing")),
        "describes no causal LM",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_gets_a_clear_error(tmp_path, damage, message):
    """One line that names the file, the tensor or the layer."""
    saved(tmp_path, tiny("llama"))
    damage(tmp_path)
    with pytest.raises((CheckpointError, ModelNotFoundError), match=message):
        load_model(str(tmp_path))


def test_nothing_is_overwritten_and_nothing_half_written_stays(tmp_path, monkeypatch):
    """A folder that holds something is refused before anything is computed; a failure leaves no folder."""
    (tmp_path / "mine").write_text("precious")
    quantized = W8A8Quantizer().quantize(tiny("llama")).model
    with pytest.raises(InvalidRequestError, match="exists and is not empty"):
        save_quantized(tmp_path, quantized)
    with pytest.raises(InvalidRequestError, match="exists and is not empty"):
        save_quantized(tmp_path / "mine", quantized)
    assert (tmp_path / "mine").read_text() == "precious"

    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quasar.checkpoints.saving.save_file", fail)
    with pytest.raises(InvalidRequestError, match="No space left on device"):
        save_quantized(tmp_path / "new", quantized)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_loaded_model_does_not_change_with_its_file(tmp_path):
    """What is in memory is no view of what may be overwritten later."""
    saved(tmp_path, tiny("llama"))
    model = load_model(str(tmp_path)).model
    expected = logits(model)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 4)
        file.write(bytes(path.stat().st_size // 2))
    assert torch.equal(logits(model), expected)


def test_an_empty_folder_is_used_and_a_full_model_refused(tmp_path):
    """The first is what a mount looks like; the second would be no quantized model."""
    with pytest.raises(UnsupportedModelError, match="no quantized layer"):
        save_quantized(tmp_path, tiny("llama"))
    quantized = saved(tmp_path, tiny("llama"))
    assert torch.equal(logits(load_model(str(tmp_path)).model), logits(quantized))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama, quantized and saved."""
    path = tmp_path_factory.mktemp("saved") / "model"
    saved(path, tiny("llama"))
    return str(path)


def test_a_model_that_comes_quantized_is_the_target(folder):
    """No quantizer needs to be named; the output equals the saved model's own, and says so."""
    pipe = Pipeline.from_pretrained(folder)
    assert (pipe.exact_to, pipe.description["quantizer"]) == ("quantized", "none")
    prompt = [*random_prompt(6), *random_prompt(6)]
    result = pipe.generate_ids(prompt, max_new_tokens=40)
    expected = Pipeline.from_model(load_model(folder).model, drafter="none").generate_ids(prompt, max_new_tokens=40)
    assert result.token_ids == expected.token_ids
    assert result.guarantee.startswith("quantized: the tokens equal those of the model as it was given")
    named = Pipeline.from_pretrained(folder, quantizer="none")
    assert named.exact_to == "quantized"


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"quantizer": "w8a8"}, "quantized already; give the full model"),
        ({"exact_to": "full"}, "needs the full weights, and this model comes quantized"),
        ({"exact_to": "full", "quantizer": "none"}, "needs the full weights, and this model comes quantized"),
        ({"exact_to": "full", "quantizer": "w8a8"}, "quantized already; give the full model"),
    ],
)
def test_what_takes_the_full_weights_is_refused(folder, choices, message):
    """They are not in the folder."""
    with pytest.raises((InvalidRequestError, UnsupportedModelError), match=message):
        Pipeline.from_pretrained(folder, **choices)


def run(*arguments):
    return CliRunner().invoke(cli, arguments)


def test_the_command_line_saves_what_every_command_reads(tmp_path, quasar_command):
    """quantize, then inspect and parity of the result."""
    full, out = str(tmp_path / "full"), str(tmp_path / "out")
    tiny("llama", tie_word_embeddings=True).save_pretrained(full)
    result = run("quantize", "--model", full, "--quantizer", "w8a8:alpha=0.3", "--out", out, "--json")
    report = json.loads(result.stdout)
    assert report["out"] == out
    assert report["quantizer"]["alpha"] == 0.3
    inspected = json.loads(run("inspect", "--model", out, "--json").stdout)
    known = {"name", "shape", "bits", "nbytes", "kernel"}
    assert [{key: layer[key] for key in known} for layer in inspected["layers"]] == [
        {key: layer[key] for key in known} for layer in report["layers"]
    ]
    assert all(layer["error"] is None for layer in inspected["layers"])
    assert inspected["quantized_bytes"] == report["quantized_bytes"] < report["full_bytes"]
    assert "MB" in run("inspect", "--model", out).stdout
    assert (
        f"use it with: quasar generate --model {out}-2" in run("quantize", "--model", full, "--out", f"{out}-2").stdout
    )
    for arguments, message in (
        (("quantize", "--model", full, "--out", out), "exists and is not empty"),
        (("quantize", "--model", full, "--out", f"{out}-3", "--quantizer", "none"), "leaves the model as it is"),
        (("quantize", "--model", out, "--out", f"{out}-3"), "quantized already"),
        (("parity", "--model", out), "comes quantized"),
    ):
        status, printed, error = quasar_command(*arguments)
        assert (status, printed) == (2, "")
        assert message in error
        assert len(error.splitlines()) == 1
    assert not (tmp_path / "out-3").exists()


class HalvedFormat:
    """A toy of a third party: values in halves, and the layers of the second block left in full."""

    def __init__(self, config):
        if config["scale"] <= 0:
            raise InvalidRequestError(f"scale {config['scale']} of the checkpoint is not positive")
        self.scale = config["scale"]

    def read(self, name, tensors):
        if "halves" not in tensors:
            return None
        values = tensors["halves"]
        return QuantizedWeight(values, torch.full((len(values), 1), self.scale))


@pytest.fixture
def halved(monkeypatch):
    """The toy's format, registered."""
    origin = Origin("acme", "1", "acme")
    plugin = LoadedPlugin(origin, (Entry("checkpoint", "halved", HalvedFormat, origin),))
    registry = Registry([*load_plugins(), plugin])
    monkeypatch.setattr(loading, "default_registry", lambda: registry)


def write_halved(folder, model, *, shards=1, scale=0.5, old_file=None, **quantization):
    model.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name in [name for name in state if ".layers.0." in name and "proj.weight" in name]:
        weight = state.pop(name)
        state[name.replace("weight", "halves")] = (weight / 0.5).round().to(torch.int8)
    names = sorted(state)
    files = [f"model-{i}.safetensors" for i in range(shards)] if shards > 1 else ["model.safetensors"]
    places = {name: files[i % shards] for i, name in enumerate(names)}
    for file in files:
        save_file({name: state[name] for name in names if places[name] == file}, folder / file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    description = {"quant_method": "halved", "scale": scale, **quantization}
    if old_file is None:
        edit_json(folder / "config.json", lambda config: config.update(quantization_config=description))
    else:
        (folder / old_file).write_text(json.dumps({"scale": scale}))
    return state


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_format_of_a_third_party_is_read(tmp_path, halved, family, shards):
    """Its layers become records, everything else is loaded as it is stored; several files too."""
    model = tiny(family)
    write_halved(tmp_path, model, shards=shards)
    loaded = load_model(str(tmp_path)).model
    layers = quantized_layers(loaded)
    assert len(layers) == 7
    assert all(name.startswith("model.layers.0.") for name in layers)
    with torch.no_grad():
        for name in layers:
            weight = model.get_submodule(name).weight
            weight.copy_((weight / 0.5).round() * 0.5)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=1e-4, atol=1e-4)
    assert not hasattr(loaded.config, "quantization_config")


@pytest.mark.parametrize(
    ("file", "method"), [("quantize_config.json", "gptq"), ("quant_config.json", "awq")], ids=["gptq", "awq"]
)
def test_descriptions_where_older_tools_wrote_them_are_found(tmp_path, file, method):
    """And a format that nothing reads is named, with what would do; transformers would make weights up."""
    write_halved(tmp_path, tiny("llama"), old_file=file)
    message = rf"it is quantized by '{method}', and the plug-ins that are loaded read quasar; install .*quasar-{method}"
    with pytest.raises(ModelNotFoundError, match=message):
        load_model(str(tmp_path))


def test_a_model_that_transformers_would_load_without_saying_that_it_is_quantized_is_refused(tmp_path):
    """It would be quantized once more, and ``exact_to="full"`` would claim what is not so."""
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda config: config.update(quantization_config={"quant_method": "fp8"}))
    with pytest.raises(ModelNotFoundError, match="it is quantized by 'fp8'"):
        load_model(str(tmp_path))


def test_weights_that_are_missing_are_not_made_up(tmp_path):
    """transformers would, with a warning."""
    tiny("llama").save_pretrained(tmp_path)
    change_tensors(lambda tensors: tensors.pop("model.norm.weight"))(tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks model.norm.weight \(1 such names\)"):
        load_model(str(tmp_path))


def test_the_precision_of_buffers_is_that_of_the_saved_model(tmp_path):
    """Also where a dtype is asked for: transformers computes rotary frequencies in float32 for every model."""
    tiny("llama").to(torch.bfloat16).save_pretrained(tmp_path / "full")
    quantized = saved(tmp_path / "out", load_model(str(tmp_path / "full"), dtype="bfloat16").model)
    loaded = load_model(str(tmp_path / "out"), dtype="bfloat16").model
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(logits(loaded), logits(quantized))


def test_the_implementation_of_attention_is_kept(tmp_path):
    """Another one sums in another order."""
    quantized = saved(tmp_path, tiny("llama", attention="eager"))
    loaded = load_model(str(tmp_path)).model
    assert loaded.config._attn_implementation == "eager"
    assert torch.equal(logits(loaded), logits(quantized))


def test_what_cannot_be_loaded_again_is_not_saved(tmp_path):
    """A name that means something else, a layer with two names, a description that is no JSON; all before writing."""
    model = tiny("llama")
    quantized = W8A8Quantizer().quantize(model).model
    with pytest.raises(InvalidRequestError, match=r"taken for a .gguf file"):
        save_quantized(tmp_path / "x.gguf", quantized)
    with pytest.raises(InvalidRequestError, match="description is not JSON"):
        save_quantized(tmp_path / "new" / "x", quantized, description={"a": object()})
    quantized.model.layers[1].mlp = quantized.model.layers[0].mlp
    with pytest.raises(UnsupportedModelError, match=r"model.layers.1.mlp.\w+ is a layer that has another name too"):
        save_quantized(tmp_path / "x", quantized)
    assert not list(tmp_path.iterdir())


def test_generation_settings_are_saved_as_they_are(tmp_path):
    """Also those that transformers would refuse to save."""
    model = tiny("llama")
    model.generation_config.temperature = 0.5
    saved(tmp_path, model)
    assert load_model(str(tmp_path)).model.generation_config.temperature == 0.5


def test_a_failure_in_moving_leaves_an_empty_folder_empty(tmp_path, monkeypatch):
    """It may be a mount with too little room."""
    quantized = W8A8Quantizer().quantize(tiny("llama")).model
    moved = []

    def move(source, target):
        if moved:
            raise OSError(28, "No space left on device")
        moved.append(shutil.copy(source, target))

    monkeypatch.setattr("quasar.checkpoints.saving.shutil.move", move)
    (tmp_path / "mount").mkdir()
    with pytest.raises(InvalidRequestError, match="No space left"):
        save_quantized(tmp_path / "mount", quantized)
    assert moved
    assert not list((tmp_path / "mount").iterdir())


def test_inspect_says_how_a_saved_model_was_quantized(tmp_path):
    """From its description."""
    saved(tmp_path, tiny("llama"), alpha=0.25)
    assert inspect_model(str(tmp_path))["quantizer"]["alpha"] == 0.25


def test_an_index_names_files_of_the_folder_alone(tmp_path, halved):
    """Nothing is read from elsewhere."""
    write_halved(tmp_path, tiny("llama"), shards=2)
    for places in ({"a": "../model-0.safetensors"}, {"a": 1}, [1], None):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        with pytest.raises(CheckpointError, match=r"no file of the folder|no weight_map from names to files"):
            load_model(str(tmp_path))


def test_what_a_format_refuses_is_said_in_its_words(tmp_path, halved):
    """One line, from the constructor."""
    write_halved(tmp_path, tiny("llama"), scale=-1)
    with pytest.raises(InvalidRequestError, match="scale -1 of the checkpoint is not positive"):
        load_model(str(tmp_path))


def test_a_missing_bias_of_a_foreign_checkpoint_is_named(tmp_path, halved):
    """Not filled with whatever is in memory."""
    state = write_halved(tmp_path, tiny("qwen2"))
    del state["model.layers.0.self_attn.q_proj.bias"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.layers.0.self_attn.q_proj.bias is missing"):
        load_model(str(tmp_path))


def test_plugins_lists_the_formats():
    """By the name in ``quant_method``."""
    assert [entry.name for entry in default_registry().entries("checkpoint")] == ["quasar"]
    rows = json.loads(run("plugins", "--json").stdout)
    assert ("checkpoint", "quasar") in {(row["kind"], row["name"]) for row in rows}


@pytest.mark.real_model
def test_smollm2_saved_and_loaded_is_the_same_model(tmp_path, smollm2):
    """With its tokenizer; tied embeddings stored once, and the file as small as the record of five blocks of thirty."""
    quantizer = HqqQuantizer(bits=4, group=64, include="model.layers.[0-4].*")
    made = quantizer.quantize(smollm2.model)
    quantized = made.model
    save_quantized(tmp_path, quantized, smollm2.tokenizer, made.report)
    loaded = load_model(str(tmp_path))
    ids = torch.tensor([smollm2.tokenizer.encode("The moon and the sun")])
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, quantized(ids).logits)
    assert loaded.tokenizer.encode("The moon") == smollm2.tokenizer.encode("The moon")
    n_values = sum(layer.in_features * layer.out_features for layer in quantized_layers(quantized).values())
    others = sum(parameter.nbytes for parameter in quantized.parameters())
    assert (tmp_path / "model.safetensors").stat().st_size < others + n_values * (0.5 + 8 / 64) * 1.02


def test_names_that_transformers_leaves_out_on_purpose_are_left_out(tmp_path, halved, monkeypatch):
    """Those of a part of the model within that part; a name beside them is refused as before."""
    model = tiny("llama")
    write_halved(tmp_path, model)
    change_tensors(lambda tensors: tensors.update({"mtp.0.norm": torch.ones(4), "model.old.bias": torch.ones(4)}))(
        tmp_path
    )
    with pytest.raises(CheckpointError, match=r"the model has no model\.old\.bias, .*2 such names"):
        load_model(str(tmp_path))
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", [r"^mtp\."])
    monkeypatch.setattr(type(model.model), "_keys_to_ignore_on_load_unexpected", [r"^old\.bias"])
    assert len(quantized_layers(load_model(str(tmp_path)).model)) == 7
    change_tensors(lambda tensors: tensors.update({"old.bias": torch.ones(4)}))(tmp_path)
    with pytest.raises(CheckpointError, match=r"the model has no old\.bias, .*1 such names"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_a_stored_head_is_kept_though_the_configuration_says_tied(tmp_path, halved, change):
    """As transformers keeps it in the same model unquantized; one that equals the embedding is tied."""
    whole, folder = tmp_path / "whole", tmp_path / "halved"
    model = tiny("llama")
    head = model.get_input_embeddings().weight.detach() + change
    model.lm_head.weight.data = head.clone()
    model.save_pretrained(whole)
    write_halved(folder, model)
    for place in (whole, folder):
        edit_json(place / "config.json", lambda config: config.update(tie_word_embeddings=True))
    expected, loaded = load_model(str(whole)).model, load_model(str(folder)).model
    assert torch.equal(expected.lm_head.weight, head)
    assert torch.equal(loaded.lm_head.weight, head)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == (change == 0)


def test_weights_of_another_name_are_named(tmp_path, halved):
    """So that nobody has to look for what is wrong."""
    write_halved(tmp_path, tiny("llama"))
    (tmp_path / "model.safetensors").rename(tmp_path / "gptq_model-4bit.safetensors")
    with pytest.raises(
        CheckpointError, match=r"no file .*model\.safetensors; beside it there is gptq_model-4bit\.safetensors"
    ):
        load_model(str(tmp_path))
