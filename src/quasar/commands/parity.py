"""Measured, not assumed: how far is a target from the full model?

The measurement speaks the Verifier protocol only, so it serves any plug-in's verifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from quasar.progress import track
from quasar.protocols import Verifier
from quasar.types import EMPTY_DRAFT
from quasar.verifiers.invariance import InvarianceReport, logits_at_width


@attrs.frozen
class AgreementReport:
    """One target against another on the other's own greedy text.

    Args:
        top1: Share of positions with the same argmax.
        kl: Mean of KL(full ‖ quantized) in nats.
        tokens: Positions compared.
        runs: Lengths of the runs of agreeing positions, in order.
    """

    top1: float
    kl: float
    tokens: int
    runs: Sequence[int]


def greedy_text(verifier: Verifier, prompt_ids: Sequence[int], n: int) -> list[int]:
    """The prompt and the n tokens that the target alone adds, ends of sequence ignored."""
    session, token_ids = verifier.start(prompt_ids), list(prompt_ids)
    for _ in range(n):
        token_ids.append(int(session.verify(EMPTY_DRAFT).logits[0].argmax()))
        session.commit(token_ids[-1:])
    return token_ids


def measure_agreement(
    full: Verifier, quantized: Verifier, texts: Sequence[tuple[int, Sequence[int]]]
) -> AgreementReport:
    """Compare two targets on given texts.

    Args:
        texts: ``(length of the prompt, all tokens)`` each; :func:`greedy_text` of ``full`` makes its own text.
    """
    same: list[bool] = []
    divergence, runs = 0.0, []
    for begin, token_ids in track(texts, "comparing with the full model"):
        one = logits_at_width(full, token_ids, begin, 1).double().log_softmax(dim=-1)
        other = logits_at_width(quantized, token_ids, begin, 1).double().log_softmax(dim=-1)
        agrees = (one.argmax(dim=-1) == other.argmax(dim=-1)).tolist()
        divergence += float((one.exp() * (one - other)).sum())
        same += agrees
        runs += _runs(agrees)
    return AgreementReport(sum(same) / len(same), divergence / len(same), len(same), runs)


def _runs(agrees: Sequence[bool]) -> list[int]:
    """Lengths of the runs of True; e.g. True True False True gives 2, 1."""
    marks = "".join("x" if agree else " " for agree in agrees)
    return [len(run) for run in marks.split()]


def as_json(invariance: InvarianceReport, agreement: AgreementReport | None) -> dict[str, Any]:
    """The object that ``quasar parity --json`` prints."""
    return {
        "invariance": {
            "declared": invariance.declared,
            "measured": invariance.measured,
            "holds": invariance.holds,
            "forks": [attrs.asdict(fork) for fork in invariance.forks],
        },
        "widths": {str(width): attrs.asdict(report) for width, report in invariance.widths.items()},
        "agreement": None if agreement is None else attrs.asdict(agreement),
    }
