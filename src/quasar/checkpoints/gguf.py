"""Loads a ``.gguf`` file through transformers, which is kept from reading it three times, and from dropping things.

transformers builds the configuration, the tokenizer and the model, and turns blocks into floating point; the weights
are its own, bit for bit. It reads the metadata anew for each of the three, looks a name of every layer up in a
table that it makes anew for every module, and maps few rows back at once: that takes several times as long as the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils
from transformers.integrations.gguf import reader as _header

from quasar.checkpoints.gguf_contents import check_tensors, complete_config
from quasar.errors import InvalidRequestError
from quasar.quantizers.gguf.file import Outline, replaced

_loading: Any = modeling_gguf_pytorch_utils
_alone = threading.RLock()


def load_gguf(file: Path, dtype: torch.dtype | str) -> tuple[Any, Any, list[str]]:
    """The model of a file, its tokenizer, and the names of parameters that the file lacks.

    Raises:
        CheckpointError: It is a part of one, or stores or declares what the model cannot take.
        ValueError: It is no GGUF file; OSError, RuntimeError, …: as transformers raises.
    """
    from quasar.quantizers.gguf.reader import open_gguf  # imports the package gguf, which need not be installed

    try:
        reader = open_gguf(file)
    except InvalidRequestError as error:
        raise ValueError(str(error).removeprefix("gguf: ")) from error
    where: Any = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with _reading_once(file, reader):
        config = AutoConfig.from_pretrained(**where)
        complete_config(config, reader, file)
        tokenizer = AutoTokenizer.from_pretrained(**where)
        loading: Any = AutoModelForCausalLM.from_pretrained(
            **where, config=config, dtype=dtype, output_loading_info=True
        )
    model, found = loading
    check_tensors(model, reader, file)
    return model, tokenizer, sorted(found["missing_keys"])


@contextmanager
def _reading_once(file: Path, reader: Any) -> Iterator[None]:
    """Let transformers' functions have the reader that stands, for this file alone."""
    import gguf

    from quasar.quantizers.gguf.reader import dequantize, mapped

    original = _loading.load_gguf_checkpoint
    parsed: dict[str, Any] = {}

    def load(path: Any, return_tensors: bool = False, model_to_load: Any = None, torch_dtype: Any = None) -> Any:
        if Path(path).resolve() != file.resolve():
            return original(path, return_tensors, model_to_load, torch_dtype)
        with replaced(gguf, GGUFReader=lambda _path: reader, dequantize=dequantize):
            if return_tensors:
                return original(path, True, Outline(model_to_load), torch_dtype)
            if not parsed:
                parsed.update(original(path))
                n_tokens = reader.lengths.get("tokenizer.ggml.tokens")
                if n_tokens and not parsed["config"].get("vocab_size"):
                    parsed["config"]["vocab_size"] = n_tokens
            return deepcopy(parsed)

    with _alone, replaced(_loading, load_gguf_checkpoint=load), replaced(_header, _mapped=mapped):
        yield
