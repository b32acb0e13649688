"""All hooks, and the marker with which a plug-in implements them.

A hook only declares: it returns ``{name: factory}`` and loads nothing. A factory is a callable, usually the strategy's
class, or its import path ``"package.module:attribute"``; the options of a spec string (``"name:k=5"``) become its
keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pluggy

Factory = Callable[..., Any] | str

hookspec = pluggy.HookspecMarker("quasar")
hookimpl = pluggy.HookimplMarker("quasar")


@hookspec
def quasar_drafters() -> Mapping[str, Factory]:  # type: ignore[empty-body]
    """Drafters: ``factory(**options)`` returns a Drafter, or a function ``(token_ids, k) -> token ids``.

    Example::

        @hookimpl
        def quasar_drafters():
            return {"echo": EchoDrafter}
    """


@hookspec
def quasar_verifiers() -> Mapping[str, Factory]:  # type: ignore[empty-body]
    """Verifiers: ``factory(model, **options)`` returns a Verifier over a transformers causal LM."""


@hookspec
def quasar_quantizers() -> Mapping[str, Factory]:  # type: ignore[empty-body]
    """Quantizers: ``factory(**options)`` returns a Quantizer."""


@hookspec
def quasar_policies() -> Mapping[str, Factory]:  # type: ignore[empty-body]
    """Acceptance policies: ``factory(**options)`` returns an AcceptancePolicy."""


@hookspec
def quasar_kernels() -> Mapping[str, Factory]:  # type: ignore[empty-body]
    """Kernels: ``factory(**options)`` returns a Kernel, which executes QuantizedWeights."""


@hookspec
def quasar_checkpoints() -> Mapping[str, Factory]:  # type: ignore[empty-body]
    """Formats of quantized models, each by the ``quant_method`` that it reads.

    ``factory(config)`` gets the checkpoint's ``quantization_config`` and returns a CheckpointFormat.
    """


@hookspec
def quasar_commands() -> Mapping[str, Factory]:  # type: ignore[empty-body]
    """Commands of the program ``quasar``, each a :class:`click.Command`, which may be a group, or its import path."""
