"""Small ``.gguf`` files, written by the package gguf the way llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
}
"""Where a block has numbers of 16 bits; the rest of its bytes may be any."""

ROUNDED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""Types that the package can round to. A weight of another type is made of random blocks."""


def with_halves(blocks: np.ndarray, type_name: str, halves: np.ndarray) -> np.ndarray:
    """``[n, bytes]`` blocks with ``[n, number of them]`` float16 in their places."""
    for place, column in zip(HALVES[type_name], halves.T, strict=True):
        blocks[:, place : place + 2] = np.ascontiguousarray(column)[:, None].view(np.uint8)
    return blocks


def random_rows(shape: Sequence[int], type_name: str, seed: int) -> np.ndarray:
    """``[out, bytes of a row]`` of random blocks that map back to values below 1."""
    size, nbytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    generator, n = np.random.default_rng(seed), shape[0] * shape[1] // size
    blocks = generator.integers(0, 256, (n, nbytes), dtype=np.uint8)
    halves = (generator.normal(size=(n, len(HALVES[type_name]))) / 2000).astype(np.float16)
    return with_halves(blocks, type_name, halves).reshape(shape[0], -1)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    type_of: Callable[[str], str],
    declare: Callable[[GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write a Llama, Qwen 2, Gemma 3 or GPT-2.

    Args:
        type_of: From the name of a matrix in the file, as in ``blk.0.attn_q.weight``, to its type.
        declare: Writes further keys or tensors.
    """
    kind = model.config.model_type.removesuffix("_text")
    writer = GGUFWriter(path, kind)
    _write_settings(writer, model)
    _write_tokenizer(writer, model.config.vocab_size)
    declare(writer)
    (architecture,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    tied = model.config.tie_word_embeddings
    for i, (name, tensor) in enumerate(model.state_dict().items()):
        if name == "lm_head.weight" and tied:
            continue
        base, _, suffix = name.rpartition(".")
        stored = f"{names.get_name(base)}.{suffix}"
        module = model.get_submodule(base)
        values = (tensor.T if isinstance(module, Conv1D) and tensor.dim() == 2 else tensor).float().numpy()
        if kind == "gemma3" and "norm" in stored:
            values = values + 1
        if kind == "llama" and ".attn_q." in stored:
            values = _in_pairs(values, model.config.num_attention_heads)
        if kind == "llama" and ".attn_k." in stored:
            values = _in_pairs(values, model.config.num_key_value_heads)
        type_name = type_of(stored) if values.ndim == 2 else "F32"
        kind_of_number = GGMLQuantizationType[type_name]
        rows = (
            gguf.quants.quantize(np.ascontiguousarray(values, dtype=np.float32), kind_of_number)
            if type_name in ROUNDED
            else random_rows(values.shape, type_name, seed=i)
        )
        writer.add_tensor(stored, rows, raw_dtype=kind_of_number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _in_pairs(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows as llama.cpp wants them: those that rotate together lie together."""
    pairs = weight.reshape(n_heads, 2, -1, weight.shape[1])
    return pairs.transpose(0, 2, 1, 3).reshape(weight.shape)


def _write_settings(writer: GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(config.n_inner)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    if config.model_type == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if config.model_type == "gemma3_text":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)


def _write_tokenizer(writer: GGUFWriter, n_tokens: int) -> None:
    """Signs, digits and capital letters, each a token, and one merge."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<pad>", "<s>", "</s>", "AB", *(chr(ord("!") + i) for i in range(n_tokens - 4))])
    writer.add_token_types([3, 3, 3, *[1] * (n_tokens - 3)])
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def apart(first: torch.Tensor, second: torch.Tensor) -> float:
    """Largest difference as a share of the largest value."""
    first, second = first.detach().float(), second.detach().float()
    return float((first - second).abs().max() / second.abs().max())
