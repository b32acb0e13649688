"""Measured, not assumed: does what a verifier says depend on how many positions it is asked at once?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from quasar.errors import InvalidRequestError
from quasar.progress import track
from quasar.protocols import Invariance, Verifier
from quasar.types import Draft

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
