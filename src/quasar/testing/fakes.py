"""Fakes with exact arithmetic and exact counts: a target, a drafter that knows it, a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quasar.protocols import Invariance
from quasar.types import Draft, Verification

Proposer = Callable[[list[int], int], list[int]]


class TableLM:
    """A verifier whose logits are a float64 function of the last ``order`` tokens: equality with it is exact.

    Its features, whatever they are called, are the logits themselves.

    Args:
        seed: Chooses the table.
        levels: Logits are integers below this, so that ties occur when it is small.
        max_length: The longest sequence, as any verifier has it.
    """

    invariance: Invariance = "bitwise"
    approximations: tuple[str, ...] = ()

    def __init__(
        self, vocab_size: int, seed: int = 0, order: int = 2, levels: int = 1000, max_length: int | None = None
    ):
        self.vocab_size, self.max_length = vocab_size, max_length
        self._order, self._seed, self._levels = order, seed, levels
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}
        self.sessions: list[TableSession] = []

    def row(self, context: Sequence[int]) -> torch.Tensor:
        """``[V]`` float64 logits of the token after ``context``."""
        key = tuple(context[-self._order :])
        if key not in self._rows:
            generator = torch.Generator().manual_seed(hash((self._seed, *key)) % 2**63)
            self._rows[key] = torch.randint(
                self._levels, (self.vocab_size,), device="cpu", generator=generator
            ).double()
        return self._rows[key]

    def greedy(self, prompt_ids: Sequence[int], n: int) -> list[int]:
        """The n tokens that plain greedy decoding adds, without any stop."""
        token_ids = list(prompt_ids)
        for _ in range(n):
            row = self.row(token_ids).tolist()
            token_ids.append(row.index(max(row)))
        return token_ids[len(prompt_ids) :]

    def start(self, prompt_ids: Sequence[int], needs: frozenset[str] = frozenset()) -> TableSession:
        self.sessions.append(TableSession(self, prompt_ids, needs))
        return self.sessions[-1]


class TableSession:
    """Keeps the tokens that a real session would have cached, and checks that what is committed was drafted.

    Attributes:
        cached: Tokens whose keys and values a real session would hold.
        widths: Widths of all verifications so far.
        rollbacks: How often a step kept less than was verified.
    """

    def __init__(self, lm: TableLM, prompt_ids: Sequence[int], needs: frozenset[str] = frozenset()) -> None:
        self._lm = lm
        self._needs = needs
        self.cached = list(prompt_ids[:-1])
        self.kept = len(self.cached)
        self.last = prompt_ids[-1]
        self.committed_length = len(prompt_ids)
        self.widths: list[int] = []
        self.rollbacks = 0

    @property
    def cached_length(self) -> int:
        """Positions cached."""
        return len(self.cached)

    def verify(self, draft: Draft) -> Verification:
        del self.cached[self.kept :]  # in case the last draft was verified and never judged
        tokens = [self.last, *draft.token_ids]
        self.widths.append(len(tokens))
        rows = [self._lm.row([*self.cached, *tokens[: i + 1]]) for i in range(len(tokens))]
        self.cached += tokens
        logits = torch.stack(rows)
        return Verification(logits, {name: logits.clone() for name in self._needs})

    def commit(self, token_ids: Sequence[int]) -> None:
        kept = self.committed_length - 1 + len(token_ids)
        assert self.cached[self.committed_length :][: len(token_ids) - 1] == list(token_ids[:-1])
        self.rollbacks += kept < len(self.cached)
        del self.cached[kept:]
        self.committed_length += len(token_ids)
        self.last = token_ids[-1]
        self.kept = len(self.cached)
        assert self.kept == self.committed_length - 1


def scripted(prompt_length: int, target: Sequence[int], k: int, bad: int = 0, vocab_size: int = 2**31) -> Proposer:
    """A function drafter that knows the ``target`` output: right everywhere but at every ``bad``-th position.

    ``bad=0``: never wrong; ``bad=1``: always; token i is wrong where ``i % bad == 0``.
    """

    def propose(token_ids: list[int], max_tokens: int) -> list[int]:
        n = len(token_ids) - prompt_length
        draft = list(target[n : n + min(k, max_tokens)])
        return [(t + 1) % vocab_size if bad and (n + i) % bad == 0 else t for i, t in enumerate(draft)]

    return propose


class ByteTokenizer:
    """A tokenizer whose tokens are byte strings, rendered as byte-level tokenizers do: invalid UTF-8 becomes U+FFFD."""

    chat_template = None

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = list(pieces)

    def decode(self, token_ids: Sequence[int], **options: object) -> str:
        return b"".join(self.pieces[token_id] for token_id in token_ids).decode("utf-8", errors="replace")

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return repr(self.pieces[token_id])
