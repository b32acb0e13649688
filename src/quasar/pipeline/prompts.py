"""From what a user wrote to token ids."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quasar.errors import InvalidRequestError

Messages = Sequence[Mapping[str, str]]
Prompt = str | Messages


def encode_prompt(tokenizer: Any, prompt: Prompt, *, raw: bool = False) -> list[int]:
    """Token ids of a text or of chat messages.

    A text is put as the one user message into the model's chat template, if it has one and ``raw`` is false; otherwise
    it is tokenized as it is, with the special tokens that the tokenizer adds by itself.

    Raises:
        InvalidRequestError: Neither text nor messages, messages without a chat template, no tokenizer, no tokens.
    """
    if tokenizer is None:
        raise InvalidRequestError("there is no tokenizer to encode a text with; use generate_ids with token ids")
    is_text = isinstance(prompt, str)
    if not is_text and not _are_messages(prompt):
        raise InvalidRequestError(
            f"prompt {_shown(prompt)} is neither a text nor a list of messages {{'role': …, 'content': …}}; "
            "several prompts are decoded by several calls"
        )
    if is_text and (raw or not tokenizer.chat_template):
        token_ids = _tokenize(tokenizer, str(prompt))
    elif not tokenizer.chat_template:
        raise InvalidRequestError("messages need a chat template, and this model's tokenizer has none; give a text")
    else:
        messages = [{"role": "user", "content": prompt}] if is_text else [dict(message) for message in prompt]  # type: ignore[arg-type]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        token_ids = _tokenize(tokenizer, rendered, add_special_tokens=False)
    if not token_ids:
        raise InvalidRequestError("the prompt has no tokens; give at least one")
    return token_ids


def _tokenize(tokenizer: Any, text: str, **options: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the prompt holds {text[error.start]!r}, half a character: it was read with a wrong encoding; give UTF-8"
        ) from error
    return list(tokenizer(text, **options)["input_ids"])


def _shown(value: object) -> str:
    return text if len(text := repr(value)) <= 80 else f"{text[:79]}…"


def _are_messages(prompt: object) -> bool:
    return (
        isinstance(prompt, Sequence)
        and len(prompt) > 0
        and all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in prompt)
    )


def checked_prompt_ids(prompt_ids: Any) -> list[int]:
    """Token ids from a sequence or an integer tensor ``[T]`` or ``[1, T]``.

    Raises:
        InvalidRequestError: Several sequences, none, or something that is no integer.
    """
    values = prompt_ids.tolist() if hasattr(prompt_ids, "tolist") else prompt_ids
    values = list(values) if isinstance(values, Iterable) else []
    if values and isinstance(values[0], list | tuple):
        if len(values) > 1:
            raise InvalidRequestError(f"got a batch of {len(values)} prompts; Quasar decodes one sequence a call")
        values = list(values[0])
    try:
        token_ids = [operator.index(value) for value in values]  # numpy's integers too
    except TypeError:
        token_ids = []
    if not token_ids or any(isinstance(value, bool) for value in values):
        raise InvalidRequestError(
            f"prompt_ids {_shown(prompt_ids)}: give at least one integer token id, in a sequence or in an integer "
            "tensor [T] or [1, T]"
        )
    return token_ids
