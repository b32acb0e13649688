"""What the loop checks of strategies that others wrote, so that a fault is named where it happens."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from quasar.errors import NumericalError, PluginError, QuasarError
from quasar.loop.rows import HostRows, NoTokenError, best_place, is_choosable
from quasar.loop.sampling import Sampling
from quasar.protocols import (
    AcceptancePolicy,
    Bindable,
    Closable,
    Drafter,
    DraftSession,
    EasilyCalibrated,
    Prefillable,
    Quantizer,
    Restartable,
    Verifier,
    VerifySession,
)
from quasar.registry.signatures import accepts, check_signatures, offers
from quasar.types import Draft, Quantized, Verdict, Verification

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


def quantize(quantizer: Quantizer, model: Any, calibration: Sequence[Any] | None) -> Quantized:
    """What a quantizer makes of a model, checked to be that.

    Raises:
        PluginError: It is not.
    """
    with faults_of(quantizer, "quantize"):
        made = quantizer.quantize(model, calibration)
    if not isinstance(made, Quantized):
        got = f"{type(quantizer).__name__}.quantize returned {type(made).__name__}"
        raise PluginError(f"{got}, expected quasar.Quantized(model, report)")
    return made


def is_bindable(drafter: Drafter) -> bool:
    """Whether a drafter wants to know the target's model."""
    return offers(Bindable, drafter, type(drafter).__name__)


def enough_prompts(quantizer: Quantizer) -> int | None:
    """How many of Quasar's own calibration prompts are enough for a quantizer; ``None``: all of them."""
    if not offers(EasilyCalibrated, quantizer, type(quantizer).__name__):
        return None
    easily: EasilyCalibrated = quantizer  # type: ignore[assignment]
    return easily.enough_prompts


def start_drafting(
    drafter: Drafter, prompt_ids: Sequence[int], sampling: Sampling, target: VerifySession
) -> DraftSession:
    """Start a draft session beside the session of its target, and check that it is one."""
    start: Any = drafter.start
    takes_target = accepts(inspect.signature(start), 3)
    with faults_of(drafter, "start"):
        session: DraftSession = start(prompt_ids, sampling, target) if takes_target else start(prompt_ids, sampling)
    who = f"what {type(drafter).__name__}.start returned"
    check_signatures(DraftSession, session, who)
    offers(Restartable, session, who)
    return session


def start_verifying(verifier: Verifier, prompt_ids: Sequence[int], needs: frozenset[str]) -> VerifySession:
    """Start a verify session and check that it is one. Its prompt may be pending: see :func:`prefill`."""
    with faults_of(verifier, "start"):
        session = verifier.start(prompt_ids, needs)
    who = f"what {type(verifier).__name__}.start returned"
    check_signatures(VerifySession, session, who)
    for optional in (Restartable, Prefillable, Closable):
        offers(optional, session, who)
    return session


def restarted(session: Any, token_ids: Sequence[int]) -> bool:
    """Let a session of either kind become that of other tokens; ``False`` if it cannot, and is as it was."""
    if not hasattr(session, "restart"):
        return False
    session.restart(token_ids)
    return True


def prefill(session: VerifySession, max_rows: int | None = None) -> int:
    """Compute what is pending of a prompt, or about ``max_rows`` of it; returns what is still pending."""
    if not hasattr(session, "prefill"):
        return 0  # it has done so, or does with its first draft
    prefillable: Prefillable = session  # type: ignore[assignment]
    while prefillable.pending > 0:
        before = prefillable.pending
        prefillable.prefill(before if max_rows is None else max_rows)
        if max_rows is not None:
            break
        if prefillable.pending >= before:
            raise PluginError(f"{type(session).__name__}.prefill({before}) left {prefillable.pending} tokens pending")
    return prefillable.pending


class faults_of:  # noqa: N801 - reads as what it does, in a ``with`` statement
    """Name the strategy whose method raised something that is neither an error of ours nor a lack of memory."""

    __slots__ = ("_method", "_strategy")

    def __init__(self, strategy: object, method: str) -> None:
        self._strategy, self._method = strategy, method

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or isinstance(error, (QuasarError, MemoryError, torch.OutOfMemoryError)):
            return
        if isinstance(error, Exception):
            name = f"{type(self._strategy).__name__}.{self._method}"
            raise PluginError(f"{name} raised {type(error).__name__}: {error}") from error


def checked_draft(draft: Draft, max_tokens: int, session: DraftSession, verifier: Verifier) -> Draft:
    """The part of a draft that the target can verify.

    Raises:
        PluginError: It is no draft, or its probabilities are not one row a token.
    """
    if not isinstance(draft, Draft):
        raise PluginError(f"{type(session).__name__} proposed {type(draft).__name__} {draft!r:.60}, expected a Draft")
    if draft.probs is not None and _shape_of(draft.probs)[:1] != [len(draft)]:
        raise PluginError(
            f"{type(session).__name__} proposed {len(draft)} tokens with probs {_shown(draft.probs)}; "
            f"expected [k, V] = [{len(draft)}, V]"
        )
    return draft.clipped(max_tokens, verifier.vocab_size)


def checked_verification(verification: Verification, draft: Draft, verifier: Verifier) -> Verification:
    """Return ``verification`` if its logits are ``[k+1, V]``.

    Waits for the device, so that the seconds of a verification are counted as such. Whether tokens can be chosen from
    a row shows when one is.

    Raises:
        PluginError: Wrong shape.
    """
    name, expected = type(verifier).__name__, [len(draft) + 1, verifier.vocab_size]
    if not isinstance(verification, Verification):
        raise PluginError(f"{name} returned {type(verification).__name__}, expected a Verification")
    if _shape_of(verification.logits) != expected:
        raise PluginError(f"{name} returned logits {_shown(verification.logits)}, expected [k+1, V] = {expected}")
    if verification.logits.device.type != "cpu":
        torch.accelerator.synchronize(verification.logits.device)
    return verification


def _shape_of(matrix: object) -> list[int]:
    """Of a tensor with two dimensions; nothing of anything else."""
    return list(matrix.shape) if isinstance(matrix, torch.Tensor) and matrix.dim() == 2 else []


def _shown(given: object) -> str:
    return f"of shape {list(given.shape)}" if isinstance(given, torch.Tensor) else f"of type {type(given).__name__}"


class naming:  # noqa: N801 - as above
    """Where no token can be chosen from a row of the target's own logits, say whose they are.

    Raises:
        NumericalError: A row that was reached holds NaN or +inf, or nothing but -inf.
    """

    __slots__ = ("_raw", "_verifier")

    def __init__(self, verifier: Verifier, raw: Verification) -> None:
        self._verifier, self._raw = verifier, raw

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, NoTokenError):
            return
        rows = HostRows(self._raw.logits)
        row = next((i for i in range(len(rows)) if not is_choosable(rows[i])), 0)
        raise NumericalError(
            f"{type(self._verifier).__name__} returned logits whose largest value is {error.largest} in row {row} of "
            f"{len(rows)}: no token can be chosen from them (non-finite weights, or float16 overflow?)"
        ) from error


def check_every_row(verification: Verification, verifier: Verifier) -> None:
    """Raise :class:`NumericalError` where no token can be chosen from some row, reached or not."""
    with naming(verifier, verification):
        rows = HostRows(verification.logits)
        for row in range(len(rows)):
            best_place(rows[row])


def checked_verdict(
    verdict: Verdict, draft: Draft, verification: Verification, policy: AcceptancePolicy, verifier: Verifier
) -> Verdict:
    """Return ``verdict`` if it keeps tokens that were drafted and adds one that the target has and may say.

    Raises:
        PluginError: It does not.
        NumericalError: No token can be chosen from a row that one was chosen from.
    """
    if not isinstance(verdict, Verdict):
        raise PluginError(f"{type(policy).__name__}.decide returned {verdict!r:.60}, expected a Verdict")
    n, who = verdict.n_accepted, type(policy).__name__
    if not 0 <= n <= len(draft) or not 0 <= verdict.next_token < verifier.vocab_size:
        raise PluginError(
            f"{who} returned {verdict} for a draft of {len(draft)} tokens; expected n_accepted in "
            f"0…{len(draft)} and next_token in 0…{verifier.vocab_size - 1}"
        )
    rows = HostRows(verification.rows)
    for row, token_id in enumerate(verdict.committed(draft)):
        logit = float(rows[row][token_id])
        if not math.isfinite(logit):
            best_place(rows[row])
            raise PluginError(f"{who} returned token {token_id} at row {row}, whose logit is {logit}")
    return verdict
