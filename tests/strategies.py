"""Hypothesis strategies for tests of the loop."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from hypothesis import strategies as st

from quasar.testing.fakes import ByteTokenizer, TableLM

PIECES = [b"a", b"b", b"ab", b"\n", b" ", b"\xe2\x82\xac", b"\xe2\x82", b"\xac", b"", b"!"]
"""What the tokens of the fake tokenizer stand for: letters, space, a euro sign whole and in parts, nothing."""


@attrs.frozen
class Step:
    """What a drafter proposes in one step: the target's own next tokens, then something else."""

    n_right: int
    junk: tuple[int, ...]


@attrs.frozen
class Case:
    """A target, a prompt, the stops, and a drafter of any behaviour."""

    vocab_size: int
    seed: int
    levels: int
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    eos_token_ids: int | tuple[int, ...] | None
    stop: tuple[str, ...]
    criterion_token: int | None
    steps: tuple[Step, ...]

    def target(self) -> TableLM:
        return TableLM(self.vocab_size, seed=self.seed, levels=self.levels)

    def tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer(PIECES[: self.vocab_size])

    def criteria(self) -> list:
        if self.criterion_token is None:
            return []
        return [lambda token_ids: token_ids[-1] == self.criterion_token and len(token_ids) % 3 == 0]

    def drafter(self):
        """A function drafter; its first ``n_right`` tokens are what greedy decoding would say."""
        table, turn = self.target(), iter(range(10**9))

        def propose(token_ids: list[int], max_tokens: int) -> Sequence[int]:
            step = self.steps[next(turn) % len(self.steps)]
            return [*table.greedy(token_ids, step.n_right), *step.junk]

        return propose


def steps(vocab_size: int) -> st.SearchStrategy[Step]:
    """E.g. ``Step(n_right=5, junk=(2, -1))``: too long, too short, outside the vocabulary, right, wrong, empty."""
    junk = st.lists(st.integers(-1, vocab_size), max_size=6).map(tuple)
    return st.builds(Step, n_right=st.integers(0, 16), junk=junk)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """E.g. a vocabulary of 4 with ties, prompt (1, 0), budget 17, EOS 3, stop "ab", a drafter right for 6 tokens."""
    vocab_size = draw(st.integers(2, len(PIECES)))
    token = st.integers(0, vocab_size - 1)
    eos = st.none() | token | st.lists(token, max_size=3).map(tuple)
    stop = st.text("ab\n €!", min_size=1, max_size=4)
    return Case(
        vocab_size=vocab_size,
        seed=draw(st.integers(0, 10**6)),
        levels=draw(st.sampled_from([2, 3, 1000])),
        prompt_ids=tuple(draw(st.lists(token, min_size=1, max_size=8))),
        max_new_tokens=draw(st.integers(1, 40)),
        eos_token_ids=draw(st.none() | eos),
        stop=tuple(draw(st.lists(stop, max_size=3))),
        criterion_token=draw(st.none() | token),
        steps=tuple(draw(st.lists(steps(vocab_size), min_size=1, max_size=5))),
    )
