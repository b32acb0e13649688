"""Speculative decoding: the loop, and the plain decoding that it must equal.

Algorithm 1 of Leviathan et al. 2023 (arXiv 2211.17192) in the words used here: their M_q is the drafter, M_p the
target behind the verifier, gamma is k, and the ``n + 1`` tokens of a step are the *committed* ones. Quasar
(arXiv 2603.01399) is this loop with an n-gram drafter and a verifier whose target is a quantized copy of the model.

Not in Algorithm 1, but needed for correct output: the committed tokens pass :meth:`Stopping.truncate` before anything
else sees them, so that an EOS, a stop string or the budget in the middle of a block ends the output right there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quasar.checks import checked_draft, checked_verdict, checked_verification, start_drafting, start_verifying
from quasar.protocols import AcceptancePolicy, Drafter, Verifier
from quasar.stats import DecodeStats
from quasar.stopping import Stopping
from quasar.types import EMPTY_DRAFT, Emission


def decode(
    prompt_ids: Sequence[int],
    *,
    drafter: Drafter,
    verifier: Verifier,
    policy: AcceptancePolicy,
    stopping: Stopping,
    stats: DecodeStats,
) -> Iterator[Emission]:
    """Decode one sequence; yields the tokens of each step as soon as they are final.

    Invariant between steps: the verify session has cached all committed tokens but the last.
    """
    with stats.prefilling:
        drafting = start_drafting(drafter, prompt_ids)
        verifying = start_verifying(verifier, prompt_ids, drafter.needs)
    finish_reason = None
    while finish_reason is None:
        max_tokens = stopping.remaining - 1
        with stats.drafting:
            draft = checked_draft(drafting.propose(max_tokens), max_tokens, drafter, verifier)
        with stats.verifying:
            verification = checked_verification(verifying.verify(draft), draft, verifier)
        verdict = checked_verdict(policy.decide(draft, verification), draft, policy, verifier)
        emission = stopping.truncate(verdict.committed(draft))
        verifying.commit(emission.token_ids)
        drafting.commit(emission.token_ids, verification)
        stats.record(draft, verdict, emission)
        finish_reason = emission.finish_reason
        yield emission


def reference_decode(
    prompt_ids: Sequence[int], *, verifier: Verifier, stopping: Stopping, stats: DecodeStats
) -> Iterator[Emission]:
    """Decode greedily with the target alone, one token a step: what :func:`decode` must equal."""
    with stats.prefilling:
        session = verifier.start(prompt_ids)
    finish_reason = None
    while finish_reason is None:
        with stats.verifying:
            logits = checked_verification(session.verify(EMPTY_DRAFT), EMPTY_DRAFT, verifier).logits[0]
        emission = stopping.truncate((int(logits.argmax()),))
        session.commit(emission.token_ids)
        stats.record_plain(emission)
        finish_reason = emission.finish_reason
        yield emission
