"""What the output equals, in words that are true of the strategies that made it."""

from __future__ import annotations

from quasar.protocols import AcceptancePolicy, Invariance, Verifier

_EXCEPTIONS: dict[Invariance, str] = {
    "bitwise": "without exception, for its logits do not depend on how many positions are verified at once",
    "argmax": "except where its two best logits lie within rounding (float32) of each other, since the number of "
    "positions verified at once moves the last bits of a logit",
    "none": "except where its best logits lie close together, since the number of positions verified at once moves "
    "its logits, in 16 bits by more than their last bits",
}


def guarantee_of(verifier: Verifier, policy: AcceptancePolicy, exact_to: str, target: str) -> str:
    """The claim for an output of :func:`quasar.decode.decode`; starts with what the output equals.

    Args:
        exact_to: ``"quantized"`` or ``"full"``: which model the target is.
        target: The same for a reader, as in "the w8a8-quantized model".
    """
    if not policy.lossless:
        return f"none: {type(policy).__name__} is lossy; the output may differ from that of {target}"
    return (
        f"{exact_to}: the tokens equal those of {target} decoded alone, greedily and one token a step, "
        f"{_EXCEPTIONS[verifier.invariance]}"
    )


def guarantee_of_reference(exact_to: str, target: str) -> str:
    """The claim for the target decoded alone."""
    return f"{exact_to}: the output of {target} itself, one token a step"
