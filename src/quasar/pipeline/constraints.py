"""Output that keeps to a JSON schema, a regular expression or a grammar; the library llguidance does the parsing.

Each function makes a logits processor, to be passed as ``logits_processors=[…]``. It begins with the first new token,
and ends the output with the tokenizer's EOS token. A draft may hold a token that the grammar forbids: no token can
follow it, so nothing behind it is ever chosen. llguidance is imported when the first processor is made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from quasar.errors import InvalidRequestError

Schema = Mapping[str, Any] | str
"""A JSON schema as a mapping, or as its JSON text."""


class Constraint:
    """Where one output stands in its grammar, as a logits processor.

    A call takes in the tokens that came after those of the call before; the first takes what it sees for the prompt.
    A deep copy goes on by itself and shares the compiled grammar. Quasar never calls the object that it is given, so
    that one serves any number of generations; whoever calls it directly needs a deep copy for each sequence.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._n_seen: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Put ``-inf`` where the grammar forbids a token.

        Args:
            input_ids: ``[1, T]`` integers, on any device.
            scores: ``[1, V]``, of any floating dtype, on any device. If V is larger than the tokenizer's vocabulary,
                the ids beyond it are forbidden; if it is smaller, the tokens that are missing cannot be chosen.

        Returns:
            New scores of the same shape, dtype and device: all ``-inf`` where the tokens so far do not fit the
            grammar, or where no token of the tokenizer can go on; the EOS token alone where the output is complete.
        """
        if self._n_seen is not None:
            for token_id in input_ids[0, self._n_seen :].tolist():  # consume_tokens refuses EOS behind the end
                self._matcher.consume_token(token_id)
        self._n_seen = input_ids.shape[1]
        allowed = self._allowed(scores.shape[1])
        if scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64):  # numpy wakes no threads
            given = scores.detach().numpy()
            return torch.from_numpy(np.where(allowed, given, given.dtype.type(-np.inf)))
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -float("inf"))

    def _allowed(self, n: int) -> NDArray[np.bool_]:
        """``[n]`` booleans."""
        allowed = np.zeros(n, dtype=bool)
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if not self._matcher.is_error():  # asked after the mask: it may find the error, and allows EOS in each
            bits = np.unpackbits(packed, count=self._vocab_size, bitorder="little")[:n]
            allowed[: len(bits)] = bits.view(bool)
        return allowed

    def __deepcopy__(self, memo: dict[int, Any]) -> Constraint:
        twin = Constraint(self._matcher.deep_copy(), self._vocab_size)
        twin._n_seen = self._n_seen
        return twin


def json_schema(schema: Schema, tokenizer: PreTrainedTokenizerBase | None) -> Constraint:
    """Output that is JSON and fits a schema.

    Args:
        schema: What llguidance does not implement of JSON Schema is refused. Its key ``x-guidance`` takes options such
            as ``{"whitespace_flexible": false}``.
        tokenizer: A fast transformers tokenizer with an EOS token.

    Raises:
        InvalidRequestError: llguidance is not installed, or cannot use the schema or the tokenizer.
    """
    return _constraint(_json_schema_grammar(schema), tokenizer, "JSON schema")


def regex(pattern: str, tokenizer: PreTrainedTokenizerBase | None) -> Constraint:
    """Output that a regular expression matches as a whole.

    Args:
        pattern: In the syntax of Rust's ``regex``: no look-around and no back-references.
        tokenizer: As for :func:`json_schema`.

    Raises:
        InvalidRequestError: As for :func:`json_schema`.
    """
    return _constraint(_regex_grammar(pattern), tokenizer, "regular expression")


def lark(grammar: str, tokenizer: PreTrainedTokenizerBase | None) -> Constraint:
    """Output of a context-free grammar, whose first rule is ``start``.

    Args:
        grammar: In llguidance's variant of Lark's syntax.
        tokenizer: As for :func:`json_schema`.

    Raises:
        InvalidRequestError: As for :func:`json_schema`.
    """
    return _constraint(_made("grammar", _llguidance().LLMatcher.grammar_from_lark, grammar), tokenizer, "grammar")


def check_json_schema(schema: Schema) -> None:
    """Raise :class:`InvalidRequestError` where :func:`json_schema` would, as far as that needs no tokenizer."""
    _check(_json_schema_grammar(schema), "JSON schema")


def check_regex(pattern: str) -> None:
    """Raise :class:`InvalidRequestError` where :func:`regex` would, as far as that needs no tokenizer."""
    _check(_regex_grammar(pattern), "regular expression")


def _json_schema_grammar(schema: Schema) -> str:
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        parsed = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the JSON schema is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise InvalidRequestError(f"the JSON schema is {text!r:.80}; give an object")
    return _made("JSON schema", _llguidance().LLMatcher.grammar_from_json_schema, text)


def _regex_grammar(pattern: str) -> str:
    return _made("regular expression", _llguidance().LLMatcher.grammar_from_regex, pattern)


def _made(kind: str, make: Any, text: str) -> str:
    try:
        return str(make(text))
    except (TypeError, ValueError) as error:  # no string, or half a character
        raise _refused(kind, str(error)) from error


def _check(grammar: str, kind: str) -> None:
    is_error, messages = _llguidance().LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise _refused(kind, messages[0])


def _constraint(grammar: str, tokenizer: PreTrainedTokenizerBase | None, kind: str) -> Constraint:
    adapted = _adapted(tokenizer)
    matcher = _llguidance().LLMatcher(adapted, grammar, log_level=0)
    if matcher.is_error():
        raise _refused(kind, matcher.get_error())
    return Constraint(matcher, adapted.vocab_size)


def _refused(kind: str, reason: str) -> InvalidRequestError:
    # The first line, and what a message of several lines ends in: "error: unclosed group".
    first, *others = reason.splitlines() or [""]
    causes = [line for line in others if line.startswith("error: ")]
    return InvalidRequestError(f"the {kind} cannot be used: {' '.join([first, *causes])}")


_ADAPTED: WeakKeyDictionary[PreTrainedTokenizerFast, tuple[tuple[int, int], Any]] = WeakKeyDictionary()
"""llguidance's view of a tokenizer, which takes up to a second to build, behind the size and EOS id it is for."""


def _adapted(tokenizer: PreTrainedTokenizerBase | None) -> Any:
    llguidance = _llguidance()
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InvalidRequestError(
            f"constrained output needs a fast transformers tokenizer, and this is a {type(tokenizer).__name__}"
        )
    if tokenizer.eos_token_id is None:
        raise InvalidRequestError("constrained output ends with the tokenizer's EOS token, and this one has none")
    built_for = (len(tokenizer), tokenizer.eos_token_id)
    known, adapted = _ADAPTED.get(tokenizer, (None, None))
    if known != built_for:
        try:
            adapted = llguidance.hf.from_tokenizer(tokenizer)
        except ValueError as error:
            raise _refused("tokenizer", str(error)) from error
        _ADAPTED[tokenizer] = (built_for, adapted)
    return adapted


def _llguidance() -> Any:
    try:
        import llguidance.hf
    except ImportError as error:
        raise InvalidRequestError(
            "constrained output needs llguidance; install it with: pip install 'quasar-decode[constraints]'"
        ) from error
    return llguidance
