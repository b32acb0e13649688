"""Measured, not assumed: does a verifier's answer depend on the width, and how far is it from the full model's?

Both measurements speak the Verifier protocol only, so they serve any plug-in's verifier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from quasar.errors import InvalidRequestError
from quasar.progress import track
from quasar.protocols import Invariance, Verifier
from quasar.types import EMPTY_DRAFT, Draft

WIDTHS = tuple(range(1, 17))
NEAR_TIE = 1e-3
"""Logit gap between the two best tokens below which rounding may choose between them."""


@attrs.frozen
class Fork:
    """A position where another width has another argmax; ``gap`` is between the two best logits at width 1."""

    width: int
    position: int
    gap: float


@attrs.frozen
class WidthReport:
    """One width against width 1, over the same tokens."""

    max_abs_diff: float
    argmax_mismatches: int


@attrs.frozen
class InvarianceReport:
    """What :func:`measure_invariance` found; ``holds`` compares it with what the verifier declares."""

    declared: Invariance
    measured: Invariance
    widths: Mapping[int, WidthReport]
    forks: Sequence[Fork]

    @property
    def holds(self) -> bool:
        """Whether the declaration promises no more than was measured."""
        order: list[Invariance] = ["none", "argmax", "bitwise"]
        return order.index(self.declared) <= order.index(self.measured)


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


def logits_at_width(verifier: Verifier, token_ids: Sequence[int], begin: int, width: int) -> Tensor:
    """``[n, V]`` logits that predict ``token_ids[begin:begin + n]``, ``width`` positions a forward."""
    session = verifier.start(list(token_ids[:begin]))
    rows = []
    for at in range(begin, len(token_ids) - width + 1, width):
        rows.append(session.verify(Draft(token_ids[at : at + width - 1])).logits)
        session.commit(list(token_ids[at : at + width]))
    if not rows:
        raise InvalidRequestError(f"{len(token_ids) - begin} tokens are too few for a width of {width}")
    return torch.cat(rows)


def measure_invariance(
    verifier: Verifier, token_ids: Sequence[int], begin: int, widths: Iterable[int] = WIDTHS
) -> InvarianceReport:
    """Compare every row of logits at each width with the same row at width 1, bit by bit.

    Args:
        verifier: Its ``invariance`` is what is put to the test.
        token_ids: Any sequence; ``token_ids[begin:]`` is computed at each width, so at least the largest width of it.
        begin: Length of the prompt, at least 1.
        widths: Positions a forward.
    """
    alone = logits_at_width(verifier, token_ids, begin, 1)
    best = alone.topk(2, dim=-1).values
    gaps = (best[:, 0] - best[:, 1]).tolist()
    reports, forks = {}, []
    for width in track(list(widths), "comparing widths"):
        rows = logits_at_width(verifier, token_ids, begin, width)
        same = alone[: len(rows)]
        differ = (rows.argmax(dim=-1) != same.argmax(dim=-1)).nonzero().flatten().tolist()
        forks += [Fork(width, begin + row, gaps[row]) for row in differ]
        reports[width] = WidthReport(float((rows - same).abs().max()), len(differ))
    return InvarianceReport(verifier.invariance, _measured(reports, forks), reports, forks)


def _measured(reports: Mapping[int, WidthReport], forks: Sequence[Fork]) -> Invariance:
    if all(report.max_abs_diff == 0 for report in reports.values()):
        return "bitwise"
    return "none" if any(fork.gap > NEAR_TIE for fork in forks) else "argmax"


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
