"""Does an object have the methods of a protocol, with signatures that the loop can call?

``runtime_checkable`` only looks for names: it accepts wrong arguments, and a class in place of its instance.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from quasar.errors import PluginError


def check_signatures(protocol: type, candidate: object, who: str) -> None:
    """Raise :class:`PluginError` naming ``who``, the method and both signatures where ``candidate`` does not fit."""
    if inspect.isclass(candidate):
        needed = _with_article(protocol)
        raise PluginError(f"{who} is the class {candidate.__name__} itself, expected an instance that is {needed}")
    check_members(protocol, candidate, who)


def check_members(protocol: type, candidate: object, who: str) -> None:
    """The same for anything that has the members, maybe a class."""
    needed = _with_article(protocol)
    for name, wanted in methods_of(protocol):
        method = getattr(candidate, name, None)
        if not callable(method):
            raise PluginError(f"{who} has no method {name}{_shown(wanted)}, which {needed} must have")
        _check_call(method, wanted, f"{who}: {type(candidate).__name__}.{name}", f"{protocol.__name__}.{name}")
    for name in protocol.__annotations__:
        if not has_attribute(candidate, name, who):
            raise PluginError(f"{who} has no attribute {name!r}, which {needed} must have")


def offers(protocol: type, candidate: object, who: str) -> bool:
    """Whether ``candidate`` has the members of an optional protocol.

    Raises:
        PluginError: It has one of them and lacks another, or has a method that cannot be called as the protocol says.
    """
    names = [name for name, _ in methods_of(protocol)] + list(protocol.__annotations__)
    if not any(has_attribute(candidate, name, who) for name in names):
        return False
    check_members(protocol, candidate, who)
    return True


def has_attribute(candidate: object, name: str, who: str) -> bool:
    """As ``hasattr``; an attribute that raises is named, with what it raises."""
    try:
        return hasattr(candidate, name)
    except Exception as error:
        raise PluginError(f"{who}: its attribute {name!r} raises {type(error).__name__}: {error}") from error


def check_class(protocol: type, candidate: type, who: str) -> None:
    """The same for the methods of a class that will be instantiated later; attributes may be set by then."""
    for name, wanted in methods_of(protocol):
        method = getattr(candidate, name, None)
        if not callable(method):
            raise PluginError(f"{who}: {candidate.__name__} has no method {name}{_shown(wanted)}")
        if inspect.isfunction(inspect.getattr_static(candidate, name)):
            # An unbound method: what remains after `self` is what the loop will call.
            _check_call(
                method, wanted, f"{who}: {candidate.__name__}.{name}", f"{protocol.__name__}.{name}", bound=False
            )


def check_function(function: Callable[..., Any], wanted: Callable[..., Any], who: str) -> None:
    """The same for a function that stands for a whole strategy; ``wanted`` shows how it is called."""
    _check_call(function, inspect.signature(wanted), who, "")


def methods_of(protocol: type) -> Iterator[tuple[str, inspect.Signature]]:
    """The public methods that a protocol asks for, with their signatures as a caller sees them (without ``self``)."""
    for name, member in vars(protocol).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            yield name, _without_self(inspect.signature(member))


def _check_call(method: Callable[..., Any], wanted: inspect.Signature, got: str, rule: str, bound: bool = True) -> None:
    try:
        signature = inspect.signature(method)
        signature = signature if bound else _without_self(signature)
    except ValueError:
        return  # a builtin without a signature: the call itself will tell
    required = [name for name, parameter in wanted.parameters.items() if parameter.default is parameter.empty]
    fewer = _FEWER_ARGUMENTS.get(rule)
    if fewer is not None and accepts(signature, fewer):
        return
    for arguments in (wanted.parameters, required):  # what has a default may be left out by the caller
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise PluginError(f"{got}{_shown(signature)} cannot be called as {rule}{_shown(wanted)}: {error}") from None


_FEWER_ARGUMENTS = {"Drafter.start": 2}
"""Methods that had fewer arguments once; strategies written then go on to work."""


def accepts(signature: inspect.Signature, n: int) -> bool:
    """Whether something with that signature can be called with n arguments."""
    try:
        signature.bind(*range(n))
    except TypeError:
        return False
    return True


def _with_article(protocol: type) -> str:
    return f"{'an' if protocol.__name__[0] in 'AEIOU' else 'a'} {protocol.__name__}"


def _without_self(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _shown(signature: inspect.Signature) -> str:
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
