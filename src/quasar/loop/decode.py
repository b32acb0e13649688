"""Speculative decoding: the loop, and the plain decoding that it must equal.

Algorithm 1 of Leviathan et al. 2023 (arXiv 2211.17192) in the words used here: their M_q is the drafter, M_p the
target behind the verifier, gamma is k, and the ``n + 1`` tokens of a step are the *committed* ones. Quasar
(arXiv 2603.01399) is this loop with an n-gram drafter and a verifier whose target is a quantized copy of the model.

Not in Algorithm 1, but needed for correct output: the committed tokens pass :meth:`Stopping.truncate` before anything
else sees them, so that an EOS, a stop string or the budget in the middle of a block ends the output right there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from quasar.loop.checks import (
    checked_draft,
    checked_verdict,
    checked_verification,
    start_drafting,
    start_verifying,
)
from quasar.loop.processing import Processing
from quasar.loop.sampling import Sampling
from quasar.loop.stats import DecodeStats
from quasar.loop.stopping import Stopping
from quasar.protocols import AcceptancePolicy, Drafter, DraftSession, Verifier, VerifySession
from quasar.types import EMPTY_DRAFT, Step


def decode(
    prompt_ids: Sequence[int],
    *,
    drafter: Drafter,
    verifier: Verifier,
    policy: AcceptancePolicy,
    sampling: Sampling,
    stopping: Stopping,
    processing: Processing,
    stats: DecodeStats,
) -> Iterator[Step]:
    """Decode one sequence; yields the tokens of each step as soon as they are final."""
    wants_probs = getattr(policy, "uses_draft_probs", False)
    with stats.prefilling:
        drafting = start_drafting(drafter, prompt_ids, attrs.evolve(sampling, wants_probs=wants_probs))
        verifying = start_verifying(verifier, prompt_ids, drafter.needs)
    here = sampling.at(len(prompt_ids))
    yield from speculate(drafting, verifying, verifier, policy, here, stopping, processing, stats)


def speculate(
    drafting: DraftSession,
    verifying: VerifySession,
    verifier: Verifier,
    policy: AcceptancePolicy,
    sampling: Sampling,
    stopping: Stopping,
    processing: Processing,
    stats: DecodeStats,
) -> Iterator[Step]:
    """The loop, over sessions that have been started; ``sampling`` stands at the first position to fill.

    Invariant between steps: the verify session has cached all committed tokens but the last.
    """
    finish_reason = None
    while finish_reason is None:
        max_tokens = stopping.remaining - 1
        with stats.drafting:
            draft = checked_draft(drafting.propose(max_tokens), max_tokens, drafting, verifier)
        with stats.verifying:
            raw = checked_verification(verifying.verify(draft), draft, verifier)
            verification = processing.apply(raw, draft)
        judged = policy.decide(draft, verification, sampling)
        verdict = checked_verdict(judged, draft, verification, policy, verifier)
        emission = stopping.truncate(verdict.committed(draft))
        verifying.commit(emission.token_ids)
        processing.commit(emission.token_ids)
        drafting.commit(emission.token_ids, verification)
        stats.record(draft, verdict, emission)
        sampling = sampling.at(sampling.position + len(emission.token_ids))
        finish_reason = emission.finish_reason
        yield Step(emission, verification)


def reference_decode(
    prompt_ids: Sequence[int],
    *,
    verifier: Verifier,
    sampling: Sampling,
    stopping: Stopping,
    processing: Processing,
    stats: DecodeStats,
) -> Iterator[Step]:
    """Decode with the target alone, one token a step: what :func:`decode` must equal."""
    with stats.prefilling:
        session = verifier.start(prompt_ids)
    finish_reason = None
    while finish_reason is None:
        with stats.verifying:
            raw = checked_verification(session.verify(EMPTY_DRAFT), EMPTY_DRAFT, verifier)
            verification = processing.apply(raw, EMPTY_DRAFT)
        here = sampling.at(len(prompt_ids) + stats.emitted_tokens)
        emission = stopping.truncate((here.choose(verification.logits[0]),))
        session.commit(emission.token_ids)
        processing.commit(emission.token_ids)
        stats.record_plain(emission)
        finish_reason = emission.finish_reason
        yield Step(emission, verification)
