"""From what a user wrote to token ids."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from quasar.errors import InvalidRequestError

Message = Mapping[str, Any]
Messages = Sequence[Message]
Prompt = str | Messages

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_NOT_FOR_TEMPLATES = frozenset(
    {"conversation", "tools", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
)
"""Arguments of transformers' ``apply_chat_template`` that are no variables of a template."""


@attrs.frozen
class ChatFormat:
    """How a prompt becomes the text that the model reads.

    Args:
        raw: Take a text as it is, without the model's chat template.
        tools: Functions that the template offers to the model: JSON schemas, or Python functions with docstrings.
        options: Variables for the template, such as ``{"enable_thinking": False}``.
    """

    raw: bool = False
    tools: Sequence[Any] | None = None
    options: Mapping[str, Any] = attrs.field(factory=dict)

    def check(self) -> None:
        """Refuse what no template can do.

        Raises:
            InvalidRequestError: Tools or options that are none, or that would have no effect.
        """
        if not isinstance(self.options, Mapping) or not all(isinstance(name, str) for name in self.options):
            raise InvalidRequestError(f"template_options={_shown(self.options)}: give a mapping from names to values")
        if reserved := sorted(_NOT_FOR_TEMPLATES & self.options.keys()):
            raise InvalidRequestError(f"template_options: {reserved[0]!r} is no variable of a chat template")
        if self.tools is not None and (isinstance(self.tools, str) or not isinstance(self.tools, Sequence)):
            raise InvalidRequestError(f"tools={_shown(self.tools)}: give a list of JSON schemas or functions, or None")
        if self.raw and (self.tools or self.options):
            name = "tools" if self.tools else "template_options"
            raise InvalidRequestError(f"{name} go into the chat template, and raw=True leaves that out; choose one")


PLAIN = ChatFormat()
RAW = ChatFormat(raw=True)


def encode(tokenizer: Any, prompt: Any, form: ChatFormat = PLAIN) -> list[int]:
    """Token ids of a text, of chat messages, or of token ids themselves.

    Raises:
        InvalidRequestError: None of these, or what :func:`encode_prompt` and :func:`checked_prompt_ids` refuse.
    """
    if isinstance(prompt, str) or (isinstance(prompt, Sequence) and any(isinstance(part, Mapping) for part in prompt)):
        return encode_prompt(tokenizer, prompt, form)
    if not isinstance(prompt, Iterable) or isinstance(prompt, Mapping | bytes):
        raise InvalidRequestError(f"prompt {_shown(prompt)} is neither a text, nor a list of messages, nor token ids")
    return checked_prompt_ids(prompt)


def encode_prompt(tokenizer: Any, prompt: Prompt, form: ChatFormat = PLAIN) -> list[int]:
    """Token ids of a text or of chat messages.

    A text is put as the one user message into the model's chat template, if it has one and ``form.raw`` is false;
    otherwise it is tokenized as it is, with the special tokens that the tokenizer adds by itself. If the last message
    is the assistant's, the model continues it.

    Raises:
        InvalidRequestError: Neither text nor messages, a blank text, messages without a chat template, messages that
            the template refuses, no tokenizer, no tokens.
    """
    if tokenizer is None:
        raise InvalidRequestError("there is no tokenizer to encode a text with; use generate_ids with token ids")
    template = tokenizer.chat_template
    if isinstance(prompt, str) and (form.raw or not template):
        token_ids = _tokenize(tokenizer, prompt)
    else:
        messages = _messages_of(prompt, template)
        token_ids = _tokenize(tokenizer, _rendered(tokenizer, messages, form), add_special_tokens=False)
    if not token_ids:
        raise InvalidRequestError("the prompt has no tokens; give at least one")
    return token_ids


def _messages_of(prompt: object, template: Any) -> list[dict[str, Any]]:
    """Checked messages, each with its content as one text."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise InvalidRequestError("the prompt is blank, so there is nothing to answer; raw=True takes it as it is")
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, Sequence) or not prompt or not all(map(_is_message, prompt)):
        raise InvalidRequestError(
            f"prompt {_shown(prompt)} is neither a text nor a list of messages {{'role': …, 'content': …}}; "
            "several prompts are decoded by several calls"
        )
    if not template:
        raise InvalidRequestError("messages need a chat template, and this model's tokenizer has none; give a text")
    return [_checked_message(i, message, str(template)) for i, message in enumerate(prompt)]


def _is_message(message: object) -> bool:
    """Whether it has a role, and a content, which an assistant's call of a tool may lack."""
    return isinstance(message, Mapping) and "role" in message and ("content" in message or "tool_calls" in message)


def _checked_message(i: int, message: Message, template: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or (role not in _ROLES and not _is_named(role, template)):
        close = difflib.get_close_matches(str(role), _ROLES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(_ROLES)}"
        raise InvalidRequestError(f"message {i} has the role {_shown(role)}; {hint}")
    if message.get("content") is None and message.get("tool_calls"):
        return dict(message)
    return {**message, "content": _joined(i, message.get("content"))}


def _is_named(role: str, template: str) -> bool:
    """Whether the template itself speaks of a role that is not a common one."""
    return f"'{role}'" in template or f'"{role}"' in template


def _joined(i: int, content: object) -> str:
    """A message's content as one text, which may come in parts ``{'type': 'text', 'text': …}``."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    raise InvalidRequestError(
        f"message {i} has the content {_shown(content)}; give a text, or a list of parts {{'type': 'text', 'text': …}}"
    )


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], form: ChatFormat) -> str:
    """The chat template, filled in: up to where the model's answer begins, or to the end of one that it continues."""
    *before, last = messages
    continues = last["role"] == "assistant" and not last.get("tool_calls")
    if continues and before and not last["content"].strip():
        messages, continues = before, False  # an answer without a word in it is one that has not begun
    options = {"add_generation_prompt": not continues, "continue_final_message": continues, **form.options}
    try:
        return str(tokenizer.apply_chat_template(messages, tools=form.tools, tokenize=False, **options))
    except Exception as error:  # a template is a program, and not ours
        reason = " ".join(f"{error}".split()) or type(error).__name__
        raise InvalidRequestError(
            f"the model's chat template does not take this prompt: {reason:.300}; a text with raw=True does without it"
        ) from error


def _tokenize(tokenizer: Any, text: str, **options: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the prompt holds {text[error.start]!r}, half a character: it was read with a wrong encoding; give UTF-8"
        ) from error
    return list(tokenizer(text, **options)["input_ids"])


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:79]}…"


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
