"""Speculative decoding: the loop, and the plain decoding that it must equal.

Algorithm 1 of Leviathan et al. 2023 (arXiv 2211.17192) in the words used here: their M_q is the drafter, M_p the
target behind the verifier, gamma is k, and the ``n + 1`` tokens of a step are the *committed* ones. Quasar
(arXiv 2603.01399) is this loop with an n-gram drafter and a verifier whose target is a quantized copy of the model.

Not in Algorithm 1, but needed for correct output: the committed tokens pass :meth:`Stopping.truncate` before anything
else sees them, so that an EOS, a stop string or the budget in the middle of a draft ends the output right there.
"""

from __future__ import annotations

from collections.abc import Iterator

from quasar.loop.checks import naming
from quasar.loop.decoding import Decoding, PlainDecoding
from quasar.types import EMPTY_DRAFT, Step


def speculate(one: Decoding) -> Iterator[Step]:
    """Decode one sequence; yields the tokens of each step as soon as they are final.

    Invariant between steps: the verify session has cached all committed tokens but the last.
    """
    one.prefill()
    while one.finish_reason is None:
        draft = one.propose()
        raw = one.verify(draft)
        yield one.settle(draft, raw)


def reference_decode(one: PlainDecoding) -> Iterator[Step]:
    """Decode with the target alone, one token a step: what :func:`speculate` must equal."""
    one.prefill()
    while one.finish_reason is None:
        raw = one.verify(EMPTY_DRAFT)
        verification = one.processing.apply(raw, EMPTY_DRAFT)
        with naming(one.verifier, raw):
            token_id = one.sampling.choose(verification.rows[0])
        step = one.advance((token_id,), verification)
        one.stats.record_plain(step.emission)
        yield step
