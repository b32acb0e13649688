"""Prompt lookup: continue the present n-gram as it was continued before (Quasar's drafter, arXiv 2603.01399).

The longest n-gram is tried first. Of several earlier occurrences the most recent one is taken (vLLM, which the paper
runs, takes the first), because text repeats what is near. Where the continuation runs into the end of the text, it
goes on with what it has just proposed, so a text that repeats with a period shorter than k still gets k tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from quasar.errors import InvalidRequestError
from quasar.loop.prefix import common_prefix_length
from quasar.loop.sampling import Sampling
from quasar.options import integer, option
from quasar.protocols import VerifySession
from quasar.types import EMPTY_DRAFT, Draft, Verification


@attrs.frozen
class NgramDrafter:
    """Drafts from the prompt and the output so far; needs no model.

    Args:
        k: Tokens a draft has at most.
        max_n: Longest n-gram looked up.
        min_n: Shortest n-gram looked up.

    The defaults are the paper's. A token costs ``max_n - min_n + 1`` dictionary insertions, whatever the length of the
    context.
    """

    called = "ngram"
    k: int = option(5, integer(at_least=1))
    max_n: int = option(3, integer(at_least=1))
    min_n: int = option(1, integer(at_least=1))
    needs: frozenset[str] = attrs.field(default=frozenset(), init=False)

    def __attrs_post_init__(self) -> None:
        if self.min_n > self.max_n:
            raise InvalidRequestError(f"ngram: min_n={self.min_n} is greater than max_n={self.max_n}")

    def start(self, prompt_ids: Sequence[int], sampling: Sampling, target: VerifySession) -> NgramSession:
        session = NgramSession(self)
        session.extend(prompt_ids)
        return session


class NgramSession:
    """Where each n-gram of one sequence was last continued."""

    def __init__(self, options: NgramDrafter) -> None:
        self._options = options
        self._token_ids: list[int] = []
        # n-gram -> index of the token that followed it. The n-gram at the very end has no follower yet and is absent,
        # so a lookup never finds itself.
        self._follower: dict[tuple[int, ...], int] = {}
        # What each token overwrote in _follower, so that it can be taken back.
        self._overwritten: list[list[tuple[tuple[int, ...], int | None]]] = []

    def propose(self, max_tokens: int) -> Draft:
        k = min(self._options.k, max_tokens)
        begin = self._lookup() if k > 0 else None
        if begin is None:
            return EMPTY_DRAFT
        period = len(self._token_ids) - begin
        return Draft(self._token_ids[begin + i % period] for i in range(k))

    def commit(self, token_ids: Sequence[int], verification: Verification) -> None:
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens and note each as the follower of the n-grams that end before it."""
        for token_id in token_ids:
            end = len(self._token_ids)
            overwritten = []
            for n in range(self._options.min_n, min(self._options.max_n, end) + 1):
                ngram = tuple(self._token_ids[end - n :])
                overwritten.append((ngram, self._follower.get(ngram)))
                self._follower[ngram] = end
            self._overwritten.append(overwritten)
            self._token_ids.append(token_id)

    def restart(self, token_ids: Sequence[int]) -> None:
        """Become the session of ``token_ids``; costs as many tokens as it differs by at its end."""
        common = common_prefix_length(self._token_ids, token_ids)
        while len(self._token_ids) > common:
            self._token_ids.pop()
            for ngram, index in self._overwritten.pop():
                if index is None:
                    del self._follower[ngram]
                else:
                    self._follower[ngram] = index
        self.extend(token_ids[common:])

    def _lookup(self) -> int | None:
        end = len(self._token_ids)
        for n in range(min(self._options.max_n, end), self._options.min_n - 1, -1):
            if (index := self._follower.get(tuple(self._token_ids[end - n :]))) is not None:
                return index
        return None
