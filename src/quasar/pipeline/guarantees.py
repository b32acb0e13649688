"""What the output equals, in words that are true of the strategies that made it."""

from __future__ import annotations

from quasar.errors import InvalidRequestError
from quasar.loop.sampling import Sampling
from quasar.protocols import AcceptancePolicy, Invariance, Verifier

_EXCEPTIONS: dict[Invariance, str] = {
    "bitwise": "without exception, for its logits do not depend on how many positions are verified at once",
    "argmax": "except where its two best choices lie within rounding (float32) of each other, since the number of "
    "positions verified at once moves the last bits of a logit",
    "none": "except where its best choices lie close together, since the number of positions verified at once moves "
    "its logits by more than their last bits",
}


def check_exact(exact_to: str, verifier: Verifier) -> None:
    """Refuse to promise the full model where the verifier approximates it.

    Raises:
        InvalidRequestError: It does; the message names how.
    """
    if exact_to == "full" and verifier.approximations:
        raise InvalidRequestError(
            f"exact_to='full' promises the model as it was given, and {type(verifier).__name__} approximates it "
            f"({'; '.join(verifier.approximations)}); choose a verifier that does not, or exact_to='quantized'"
        )


def guarantee_of(verifier: Verifier, policy: AcceptancePolicy, exact_to: str, target: str, sampling: Sampling) -> str:
    """The claim for an output of :func:`quasar.loop.decode.speculate`; starts with what the output equals.

    Args:
        exact_to: ``"quantized"`` or ``"full"``: which model the target is; ``"target"``: nobody said.
        target: The same for a reader, as in "the model quantized by w8a8".
    """
    target = _with_approximations(target, verifier)
    if not policy.lossless:
        return f"none: {type(policy).__name__} is lossy; the output may differ from that of {target}"
    how = "greedily" if sampling.is_greedy else f"with the same seed ({sampling.seed})"
    if sampling.is_greedy or policy.drafter_invariant:
        claim = f"the tokens equal those of {target} decoded alone, {how} and one token a step"
    else:
        claim = f"the tokens are distributed as those of {target} sampled alone"
    return f"{exact_to}: {claim}, {_EXCEPTIONS[verifier.invariance]}"


def guarantee_of_reference(verifier: Verifier, exact_to: str, target: str) -> str:
    """The claim for the target decoded alone."""
    return f"{exact_to}: the output of {_with_approximations(target, verifier)} itself, one token a step"


def _with_approximations(target: str, verifier: Verifier) -> str:
    """As in "the model as it was given, with keys and values cached in int8,"."""
    listed = verifier.approximations
    return f"{target}, with {' and with '.join(listed)}," if listed else target
