"""What the output equals, in words that are true of the strategies that made it."""

from __future__ import annotations

from quasar.loop.sampling import Sampling
from quasar.protocols import AcceptancePolicy, Invariance, Verifier

_EXCEPTIONS: dict[Invariance, str] = {
    "bitwise": "without exception, for its logits do not depend on how many positions are verified at once",
    "argmax": "except where its two best choices lie within rounding (float32) of each other, since the number of "
    "positions verified at once moves the last bits of a logit",
    "none": "except where its best choices lie close together, since the number of positions verified at once moves "
    "its logits by more than their last bits",
}


def guarantee_of(verifier: Verifier, policy: AcceptancePolicy, exact_to: str, target: str, sampling: Sampling) -> str:
    """The claim for an output of :func:`quasar.loop.decode.decode`; starts with what the output equals.

    Args:
        exact_to: ``"quantized"`` or ``"full"``: which model the target is.
        target: The same for a reader, as in "the model quantized by w8a8".
    """
    if not policy.lossless:
        return f"none: {type(policy).__name__} is lossy; the output may differ from that of {target}"
    how = "greedily" if sampling.is_greedy else f"with the same seed ({sampling.seed})"
    if sampling.is_greedy or policy.drafter_invariant:
        claim = f"the tokens equal those of {target} decoded alone, {how} and one token a step"
    else:
        claim = f"the tokens are distributed as those of {target} sampled alone"
    return f"{exact_to}: {claim}, {_EXCEPTIONS[verifier.invariance]}"


def guarantee_of_reference(exact_to: str, target: str) -> str:
    """The claim for the target decoded alone."""
    return f"{exact_to}: the output of {target} itself, one token a step"
