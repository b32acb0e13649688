"""Errors that only the compiled engine raises."""

from __future__ import annotations

from quasar.errors import InvalidRequestError


class ContextOverflowError(InvalidRequestError):
    """A sequence that would be longer than the model's context."""
