"""What a value must be, said once: validators for the options of strategies and the settings of calls.

Each is an attrs validator, and can be asked without attrs::

    @attrs.frozen
    class Drafter:
        called = "ngram"  # who refuses, in messages
        k: int = attrs.field(default=5, converter=plain_number, validator=integer(at_least=1))

    integer(at_least=1).check("k", value, who="ngram")
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from quasar.errors import InvalidRequestError


@attrs.frozen
class Expectation:
    """What a value must be.

    Args:
        expected: In words, as in "expected an integer of at least 1".
        holds: Whether a value is that.
    """

    expected: str
    holds: Callable[[Any], bool]

    def __call__(self, instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        """As attrs calls a validator; the class attribute ``called``, if there is one, says who refuses."""
        self.check(attribute.name, value, who=getattr(type(instance), "called", None))

    def check(self, name: str, value: object, *, who: str | None = None) -> None:
        """Raise :class:`InvalidRequestError`, with ``who`` refuses what, if the value is something else."""
        if not self.holds(value):
            asked = f"{name}={' '.join(repr(value).split()):.80}"
            message = f"{asked}: give {self.expected}" if who is None else f"{who}: {asked}, expected {self.expected}"
            raise InvalidRequestError(message)

    def accepted(self, name: str, value: Any, *, who: str | None = None) -> Any:
        """The value, a number as Python's own, after :meth:`check`."""
        value = plain_number(value)
        self.check(name, value, who=who)
        return value


def integer(*, at_least: int | None = None, at_most: int | None = None) -> Expectation:
    """A whole number, Python's own or numpy's, and no bool."""
    low, high = -math.inf if at_least is None else at_least, math.inf if at_most is None else at_most
    bounds = "" if at_least is None else f" of at least {at_least}"
    bounds = bounds if at_most is None else f" from {at_least} to {at_most}"
    return Expectation(f"an integer{bounds}", lambda value: is_integer(value) and low <= value <= high)


def number(
    *, at_least: float | None = None, above: float | None = None, at_most: float | None = None, below: float = math.inf
) -> Expectation:
    """A finite number within bounds, Python's own or numpy's, and no bool."""
    low = at_least if at_least is not None else -math.inf if above is None else above
    high = below if at_most is None else at_most

    def holds(value: Any) -> bool:
        if not is_number(value) or not math.isfinite(value):
            return False
        return bool(low <= value <= high and value not in (above, below))

    return Expectation(f"a number{_bounds(at_least, above, at_most, below)}", holds)


def _bounds(at_least: float | None, above: float | None, at_most: float | None, below: float) -> str:
    if at_least is not None and at_most is not None:
        return f" from {at_least} to {at_most}"
    parts = [f"of at least {at_least}" if at_least is not None else "", f"above {above}" if above is not None else ""]
    parts += [f"up to {at_most}" if at_most is not None else "", f"below {below}" if below < math.inf else ""]
    return "".join(f" {part}" for part in [" and ".join(filter(None, parts))] if part)


def choice(*values: object) -> Expectation:
    """One of a few values, or the only one."""
    one_of = "one of " if len(values) > 1 else ""
    return Expectation(f"{one_of}{', '.join(map(str, values))}", lambda value: any(_same(value, x) for x in values))


def flag() -> Expectation:
    """True or False."""
    return Expectation("true or false", lambda value: isinstance(value, bool))


def option(default: Any, expectation: Expectation) -> Any:
    """A field of an attrs class with a default, checked; a number becomes Python's own."""
    return attrs.field(default=default, converter=plain_number, validator=expectation)


def optional(expectation: Expectation) -> Expectation:
    """The same, or ``None``."""
    return Expectation(f"{expectation.expected}, or None", lambda value: value is None or expectation.holds(value))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` with the nearest of the known names; nothing if none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def plain_number(value: Any) -> Any:
    """A number of numpy, or of a tensor of one element, as Python's own; anything else as it is."""
    if not hasattr(value, "item"):
        return value
    n = value.numel() if hasattr(value, "numel") else getattr(value, "size", 0)
    return value.item() if n == 1 else value


def is_integer(value: object) -> bool:
    """Whether a value is a whole number, and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a real number, and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _same(value: object, other: object) -> bool:
    """Equal and of one type: True is not 1."""
    return type(value) is type(other) and value == other
