"""What the loop checks of strategies that others wrote, so that a fault is named where it happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quasar.errors import NumericalError, PluginError
from quasar.loop.sampling import Sampling, check_choosable, largest
from quasar.protocols import AcceptancePolicy, Bindable, Drafter, DraftSession, Need, Verifier, VerifySession
from quasar.registry.signatures import check_signatures
from quasar.types import Draft, Verdict, Verification

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def bind_drafter(
    drafter: Drafter, model: PreTrainedModel, tokenizer: Any, calibration: Sequence[Tensor] | None
) -> Drafter:
    """What the method ``bind`` of a drafter returns, checked to be a drafter; the drafter itself if it has none."""
    if not is_bindable(drafter):
        return drafter
    bindable: Bindable = drafter  # type: ignore[assignment]
    bound = bindable.bind(model, tokenizer, calibration)
    check_signatures(Drafter, bound, f"what {type(drafter).__name__}.bind returned")
    return bound


def is_bindable(drafter: Drafter) -> bool:
    """Whether a drafter wants to know the target's model."""
    return hasattr(drafter, "bind")


def start_drafting(drafter: Drafter, prompt_ids: Sequence[int], sampling: Sampling) -> DraftSession:
    """Start a draft session and check that it is one."""
    session = drafter.start(prompt_ids, sampling)
    check_signatures(DraftSession, session, f"what {type(drafter).__name__}.start returned")
    return session


def start_verifying(verifier: Verifier, prompt_ids: Sequence[int], needs: frozenset[Need]) -> VerifySession:
    """Start a verify session and check that it is one."""
    session = verifier.start(prompt_ids, needs)
    check_signatures(VerifySession, session, f"what {type(verifier).__name__}.start returned")
    return session


def checked_draft(draft: Draft, max_tokens: int, session: DraftSession, verifier: Verifier) -> Draft:
    """The part of a draft that the target can verify.

    Raises:
        PluginError: It is no draft, or its probabilities are not one row a token.
    """
    if not isinstance(draft, Draft):
        raise PluginError(f"{type(session).__name__} proposed {type(draft).__name__} {draft!r:.60}, expected a Draft")
    if draft.probs is not None and (draft.probs.dim() != 2 or len(draft.probs) != len(draft)):
        raise PluginError(
            f"{type(session).__name__} proposed {len(draft)} tokens with probs of shape {list(draft.probs.shape)}; "
            f"expected [k, V] = [{len(draft)}, V]"
        )
    return draft.clipped(max_tokens, verifier.vocab_size)


def checked_verification(verification: Verification, draft: Draft, verifier: Verifier) -> Verification:
    """Return ``verification`` if its logits are ``[k+1, V]`` and a token can be chosen from every row.

    Waits for the device, so that the seconds of a verification are counted as such.

    Raises:
        PluginError: Wrong shape.
        NumericalError: A row holds NaN or +inf, or nothing but -inf.
    """
    name, shape = type(verifier).__name__, tuple(verification.logits.shape)
    expected = (len(draft) + 1, verifier.vocab_size)
    if shape != expected:
        raise PluginError(f"{name} returned logits of shape {list(shape)}, expected [k+1, V] = {list(expected)}")
    peaks = largest(verification.logits)  # NaN and +inf propagate; all -inf stays -inf
    for position, value in enumerate(peaks):
        if not -float("inf") < value < float("inf"):
            raise NumericalError(
                f"{name} returned logits whose largest value is {value} at position {position} of a block of "
                f"{len(peaks)}: no token can be chosen from them (non-finite weights, or float16 overflow?)"
            )
    return verification


def checked_verdict(
    verdict: Verdict, draft: Draft, verification: Verification, policy: AcceptancePolicy, verifier: Verifier
) -> Verdict:
    """Return ``verdict`` if it keeps tokens that were drafted and adds one that the target has and may say.

    Raises:
        PluginError: It does not.
        NumericalError: Logits processors left no token where one was chosen.
    """
    n = verdict.n_accepted
    if not 0 <= n <= len(draft) or not 0 <= verdict.next_token < verifier.vocab_size:
        raise PluginError(
            f"{type(policy).__name__} returned {verdict} for a draft of {len(draft)} tokens; expected n_accepted in "
            f"0…{len(draft)} and next_token in 0…{verifier.vocab_size - 1}"
        )
    for row in verification.logits[: n + 1]:
        check_choosable(row)
    return verdict
