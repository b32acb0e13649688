"""What a ``.gguf`` file declares and stores, compared with what transformers took of it.

transformers takes the keys that it knows and leaves out the others without a word. Some of those change every logit.
They are taken here, or the file is refused by the name of the key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.integrations import ggml

from quasar.errors import CheckpointError
from quasar.quantizers.gguf.file import processor_for, weights_map

_tables: Any = ggml
_FREQUENCIES = "rope_freqs.weight"
_END_OF_TURN = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

_WITHOUT_EFFECT = frozenset(
    {
        *("block_count", "context_length", "vocab_size", "tensor_data_layout", "rope.scaling.finetuned"),
        *("attention.key_length", "attention.value_length"),
    }
)
"""Keys of an architecture that say once more what tensors and other keys say."""

_NEUTRAL = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.causal": (True,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "nextn_predict_layers": (0,),
}
"""Values of keys with which a model computes as it does without them."""

_SCALING_KEYS = {
    "rope.scaling.factor": "factor",
    "rope.scale_linear": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


def complete_config(config: Any, reader: Any, file: Path) -> None:
    """Take into ``config`` what transformers left out of it.

    Raises:
        CheckpointError: The file is a part of a split one, or declares what cannot be taken, by the key's name.
    """
    if (n_parts := reader.value("split.count") or 0) > 1:
        part = (reader.value("split.no") or 0) + 1
        raise CheckpointError(
            f"{file} is part {part} of {n_parts} of a split model (split.count={n_parts}); merge the parts into one "
            "file with llama-gguf-split --merge, and load that"
        )
    architecture = reader.value("general.architecture")
    _take_ends(config, reader)
    taken = _take_scaling(config, reader, architecture, file) | _take_window(config, reader, architecture)
    if any(tensor.name == _FREQUENCIES for tensor in reader.tensors):
        _take_frequencies(config, reader, file)
    if known := _table_of(architecture, config):
        _check_rotated(config, reader, architecture, file)
        taken |= {key for key, name in known.items() if name != -1}
        _refuse_others(reader, architecture, taken, file)


def check_tensors(model: Any, reader: Any, file: Path) -> None:
    """Raise :class:`CheckpointError` naming a tensor of the file that is in no parameter of the model."""
    if not _table_of(reader.value("general.architecture"), model.config):
        return  # read by newer code of transformers, which reports what it leaves out
    known = weights_map(model, processor_for(reader, model))
    names = [tensor.name for tensor in reader.tensors]
    if foreign := [name for name in names if name not in known and name != _FREQUENCIES and not _is_expert(name)]:
        raise CheckpointError(
            f"{file} stores {foreign[0]} ({len(foreign)} such names), for which transformers' "
            f"{type(model).__name__} has no place"
        )


def _is_expert(name: str) -> bool:
    return "_exps." in name or "_shexp." in name


def _take_ends(config: Any, reader: Any) -> None:
    """Tokens that end a turn end the output, as the token that ends a text does."""
    first = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    others = [reader.value(key) for key in _END_OF_TURN]
    ends = [token for token in dict.fromkeys([*first, *others]) if token is not None]
    if len(ends) > 1 and ends != first:
        config.eos_token_id = ends


def _table_of(architecture: str, config: Any) -> dict[str, Any]:
    """The keys of an architecture that transformers knows; none for one that newer code of it reads."""
    names = (architecture, config.model_type, config.model_type.removesuffix("_text"))
    return next((_tables.GGUF_CONFIG_MAPPING[name] for name in names if name in _tables.GGUF_CONFIG_MAPPING), {})


def _take_scaling(config: Any, reader: Any, architecture: str, file: Path) -> set[str]:
    """Positions that are scaled linearly, or as in YaRN (Peng et al. 2023); returns the keys that say so."""
    kind = reader.value(f"{architecture}.rope.scaling.type")
    if kind is None and reader.value(f"{architecture}.rope.scale_linear") not in (None, 0.0, 1.0):
        kind = "linear"
    if kind in (None, "none"):
        return set()
    whole = getattr(config, "rope_parameters", None) or {}
    rope = whole.get("full_attention", whole)  # layers with a window keep their positions as they are
    taken = {"rope.scaling.type", *_SCALING_KEYS}
    if rope.get("rope_type", "default") != "default":
        return taken
    found = {key: reader.value(f"{architecture}.{key}") for key in _SCALING_KEYS}
    scaling = {_SCALING_KEYS[key]: value for key, value in found.items() if value is not None}
    if kind not in ("linear", "yarn") or "rope_theta" not in rope or "factor" not in scaling:
        raise CheckpointError(
            f"{file} declares {architecture}.rope.scaling.type={kind!r}, which cannot be taken over into a "
            f"{type(config).__name__}"
        )
    if kind == "linear":
        scaling = {"factor": scaling["factor"]}
    else:
        scaling.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    changed = {**rope, "rope_type": kind, **scaling}
    config.rope_parameters = {**whole, "full_attention": changed} if "full_attention" in whole else changed
    return taken


def _take_window(config: Any, reader: Any, architecture: str) -> set[str]:
    """How far back a position sees, where a model can be told; returns the key if that is so."""
    key = "attention.sliding_window"
    window = reader.value(f"{architecture}.{key}")
    if isinstance(window, int):
        if not 0 < window < config.max_position_embeddings:
            return {key}
        if getattr(config, "sliding_window", 0) is None and not hasattr(config, "use_sliding_window"):
            config.sliding_window = window
            return {key}
    return set()


def _check_rotated(config: Any, reader: Any, architecture: str, file: Path) -> None:
    """Positions turn as many columns of a head as the file says."""
    key = f"{architecture}.rope.dimension_count"
    declared, rope = reader.value(key), getattr(config, "rope_parameters", None)
    if declared is None or not rope:
        return
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    if declared != int(size * share):
        raise CheckpointError(
            f"{file} declares {key}={declared}, and transformers' {type(config).__name__} turns {int(size * share)}"
        )


def _take_frequencies(config: Any, reader: Any, file: Path) -> None:
    """A tensor that divides the frequencies of positions: Llama 3's, which its configuration describes by numbers."""
    (stored,) = (tensor.data for tensor in reader.tensors if tensor.name == _FREQUENCIES)
    divisors = torch.tensor(stored).flatten().double()
    rope = getattr(config, "rope_parameters", None) or {}
    if bool((divisors == 1).all()):
        return
    if "rope_theta" in rope:
        n = len(divisors)
        inverse = rope["rope_theta"] ** -(torch.arange(n, dtype=torch.float64) / n)
        for original in (8192, 4096, 16384, 32768, 131072):
            scaling = {"factor": float(divisors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            if _llama3(inverse, scaling, original).allclose(inverse / divisors, rtol=1e-4, atol=0.0):
                config.rope_parameters = {
                    **rope,
                    "rope_type": "llama3",
                    **scaling,
                    "original_max_position_embeddings": original,
                }
                return
    raise CheckpointError(
        f"{file} stores {_FREQUENCIES}, frequencies of positions that are none of Llama 3's; they cannot be taken over "
        f"into a {type(config).__name__}"
    )


def _llama3(inverse: torch.Tensor, scaling: dict[str, float], original: int) -> torch.Tensor:
    """Frequencies as Llama 3.1 scales them: long waves divided, short ones kept, and in between a mixture."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    turns = original * inverse / (2 * torch.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * inverse / factor + kept * inverse


def _refuse_others(reader: Any, architecture: str, taken: set[str], file: Path) -> None:
    for name in reader.fields:
        key = name.removeprefix(f"{architecture}.")
        if key == name or key in taken or key in _WITHOUT_EFFECT or key == "rope.dimension_count":
            continue
        value = reader.value(name)
        if value not in _NEUTRAL.get(key, ()):
            raise CheckpointError(f"{file} declares {name}={value!r:.60}, which transformers does not take over")
