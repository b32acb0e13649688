"""A verifier around another one, which counts, delays, records or changes what it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quasar.protocols import Verifier, VerifySession
from quasar.types import Draft, Verification


class WrappedSession:
    """A verify session around another one: override what is to be different.

    Whatever else the inner session offers (``restart``, ``prefill``, ``cached_length``, ``close``, …) this one offers.

    Args:
        inner: The session that does the work.
    """

    def __init__(self, inner: VerifySession) -> None:
        self.inner = inner

    def verify(self, draft: Draft) -> Verification:
        """See :meth:`quasar.protocols.VerifySession.verify`."""
        return self.inner.verify(draft)

    def commit(self, token_ids: Sequence[int]) -> None:
        """See :meth:`quasar.protocols.VerifySession.commit`."""
        self.inner.commit(token_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(_inner_of(self), name)


class WrappedVerifier:
    """A verifier around another one, whose sessions it wraps: override :meth:`wrap`, and what else is to be different.

    Whatever the inner verifier declares and offers this one does. Made strict, it is the same around the strict one.

    Args:
        inner: The verifier that does the work. Where there is a spec string,
            ``quasar.registry.registry.default_registry().build_verifier(spec, model)`` makes it.
    """

    def __init__(self, inner: Verifier) -> None:
        self.inner = inner

    def wrap(self, session: VerifySession) -> VerifySession:
        """What stands around a session of the inner verifier."""
        return WrappedSession(session)

    def around(self, inner: Verifier) -> Verifier:
        """The same around another verifier; override it where ``__init__`` takes more."""
        return type(self)(inner)

    def start(self, prompt_ids: Sequence[int], needs: frozenset[str] = frozenset()) -> VerifySession:
        """See :meth:`quasar.protocols.Verifier.start`."""
        return self.wrap(self.inner.start(prompt_ids, needs))

    def __getattr__(self, name: str) -> Any:
        found = getattr(_inner_of(self), name)
        return (lambda: self.around(found())) if name == "strict" else found


def _inner_of(wrapper: Any) -> Any:
    """Without ``__getattr__``, which would ask for it for ever while a copy of the wrapper is being made."""
    try:
        return vars(wrapper)["inner"]
    except KeyError:
        raise AttributeError("inner") from None
