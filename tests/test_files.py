"""Files of a saved model, also those that an editor on Windows has saved anew."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file

from quasar.checkpoints.files import WEIGHTS, TensorFiles, read_json


def test_json_may_begin_with_a_byte_order_mark(tmp_path):
    """By itself, and where it names the files of tensors."""
    index = {"weight_map": {"a": "part.safetensors"}}
    path = tmp_path / f"{WEIGHTS}.index.json"
    path.write_text(json.dumps(index), encoding="utf-8-sig")
    save_file({"a": torch.ones(2)}, tmp_path / "part.safetensors")
    assert read_json(path) == index
    assert TensorFiles(tmp_path)["a"].tolist() == [1, 1]
