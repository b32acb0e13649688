"""A real transformers tokenizer over a few words, and a pipeline over :class:`fakes.TableLM` that speaks them."""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quasar.loop.sampling import Sampling
from quasar.pipeline.pipeline import Pipeline
from quasar.policies.coupled import CoupledPolicy
from quasar.testing.fakes import TableLM
from quasar.types import Draft, Verdict, Verification

WORDS = [
    *("<eos>", "<unk>", "user", "says", "answer", "the", "cat", "dog", "sat", "ran", "on", "under", "mat", "moon"),
    *("and", "then", "was", "warm", "é", "★", "日本", "👍", "!"),
]
CHARACTERS = '{}[]":,-0123456789abcdefghijklmnopqrstuvwxyz'
MERGES = [("{", '"'), ('"', ":"), ("t", "r"), ("u", "e"), ("tr", "ue"), ("1", "2"), ("a", "b"), ("ab", '":')]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }} says {{ m['content'] }} {% endfor %}answer"


def word_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a word of :data:`WORDS`; text is words with spaces between them. ``<eos>`` is special."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>", chat_template=chat_template
    )


def character_tokenizer(eos_token: str | None = "<eos>") -> PreTrainedTokenizerFast:
    """Byte-level BPE over :data:`CHARACTERS`, then :data:`MERGES`; the first token and the last are special."""
    pieces = [eos_token or "<none>", *CHARACTERS, *(left + right for left, right in MERGES)]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(pieces[0], special=True), AddedToken("<pad>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos_token)


def table_lm(seed: int = 0, **options: int) -> TableLM:
    """A target whose greedy output soon repeats itself, so that the n-gram drafter is right some of the time."""
    return TableLM(len(WORDS), seed=seed, **options)


def tiny_llama() -> LlamaForCausalLM:
    """A model with random weights and a vocabulary of 64; the global random state is as it was before."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def toy_pipeline(seed: int = 0, *, chat_template: str | None = None, **options: object) -> Pipeline:
    """A pipeline over :func:`table_lm` and :func:`word_tokenizer`."""
    return Pipeline(table_lm(seed), word_tokenizer(chat_template), **options)


class LooksAhead(CoupledPolicy):
    """A policy as others write it: it looks at all logits, also at those behind the token that it ends at."""

    def decide(self, draft: Draft, verification: Verification, sampling: Sampling) -> Verdict:
        assert len(verification.logits) == len(draft) + 1
        return super().decide(draft, verification, sampling)
