"""A plain function as a drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from quasar.errors import PluginError
from quasar.loop.sampling import Sampling
from quasar.protocols import VerifySession
from quasar.types import Draft, Verification


class FunctionDrafter:
    """Adapts ``propose(token_ids, k) -> token ids``.

    Args:
        propose: Called with a copy of all tokens so far (prompt and output) and with how many to propose at most.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, propose: Callable[[list[int], int], Iterable[int]]) -> None:
        self._propose = propose

    def start(self, prompt_ids: Sequence[int], sampling: Sampling, target: VerifySession) -> FunctionSession:
        return FunctionSession(self._propose, prompt_ids)


class FunctionSession:
    """The tokens of one sequence, and the function that continues them."""

    def __init__(self, propose: Callable[[list[int], int], Iterable[int]], prompt_ids: Sequence[int]) -> None:
        self._propose = propose
        self._token_ids = list(prompt_ids)

    def propose(self, max_tokens: int) -> Draft:
        proposed = self._propose(list(self._token_ids), max_tokens)
        try:
            return Draft(proposed)
        except (TypeError, ValueError) as error:
            name = getattr(self._propose, "__name__", type(self._propose).__name__)
            raise PluginError(f"the drafter {name} returned {proposed!r:.80}, expected token ids") from error

    def commit(self, token_ids: Sequence[int], verification: Verification) -> None:
        self._token_ids.extend(token_ids)

    def restart(self, token_ids: Sequence[int]) -> None:
        self._token_ids = list(token_ids)
