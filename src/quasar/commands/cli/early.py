"""What is refused before torch is imported, so that nobody waits for a refusal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from quasar.errors import InvalidRequestError

_KINDS = ("drafter", "quantizer", "policy", "verifier")


def check_names(choices: Mapping[str, Any]) -> None:
    """Refuse a strategy of a name that nothing installed provides.

    Raises:
        UnknownStrategyError: There is none of that name.
        InvalidRequestError: What was written is no spec string.
        PluginError: The plug-in that would provide it is broken.
    """
    from quasar.registry.registry import AUTO, default_registry

    for kind in _KINDS:
        if choices.get(kind, AUTO) != AUTO:
            default_registry().check_name(kind, choices[kind])


def check_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings that are out of range.

    Raises:
        InvalidRequestError: One of them, by name.
    """
    from quasar.pipeline.request import Request

    Request.of(settings)


def check_policy(settings: Mapping[str, Any], policy: str) -> None:
    """Refuse settings that the policy cannot honour. Torch is imported for that, unless the policy is ``auto``.

    Raises:
        InvalidRequestError: It cannot.
    """
    from quasar.pipeline.request import Request
    from quasar.registry.registry import AUTO, default_registry

    if policy != AUTO:
        Request.of(settings).check_policy(default_registry().build("policy", policy))


def template_options(written: Iterable[str]) -> dict[str, Any]:
    """Variables for the chat template from ``key=value``; a value that reads as JSON becomes that, others stay text.

    Raises:
        InvalidRequestError: One is no ``key=value``.
    """
    options = {}
    for text in written:
        name, equals, value = text.partition("=")
        if not (name.strip() and equals):
            raise InvalidRequestError(f"--template-option {text!r} is not key=value")
        options[name.strip()] = _value_of(value)
    return options


def _value_of(text: str) -> Any:
    if text in ("True", "False"):  # as Python's users write it; as text, both would count as true
        return text == "True"
    try:
        return json.loads(text)
    except ValueError:
        return text


def check_budget(model: str, max_new_tokens: int) -> None:
    """Refuse a budget beyond the model's context, as far as files on this machine say how long that is.

    Raises:
        InvalidRequestError: The budget alone, without a prompt, does not fit.
    """
    from quasar.checkpoints.places import context_of

    limit = context_of(model)
    if limit is not None and max_new_tokens >= limit:
        raise InvalidRequestError(
            f"max_new_tokens={max_new_tokens}, but the model's context is {limit}, prompt included"
        )
