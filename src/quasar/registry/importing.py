"""What an import path stands for, imported when it is used and not before."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from quasar.errors import PluginError
from quasar.registry.hookspecs import Factory


def resolve(factory: Factory, who: str) -> Callable[..., Any]:
    """A factory as it is, or what stands at its import path.

    Args:
        who: Whose factory it is, for messages.

    Raises:
        PluginError: It cannot be imported, or is nothing that can be called.
    """
    if not isinstance(factory, str):
        return factory
    module, _, path = factory.partition(":")
    try:
        found: Any = import_module(module)
        for attribute in path.split("."):
            found = getattr(found, attribute)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit at import included
        raise PluginError(f"{who}: {factory} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise PluginError(f"{who}: {factory} is {type(found).__name__}, expected a callable")
    return found  # type: ignore[no-any-return]
