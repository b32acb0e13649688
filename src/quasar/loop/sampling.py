"""How a token is chosen from logits, and the noise with which it is.

Noise is keyed by seed and absolute position: whatever is drafted, whatever else is decoded, position n of the sequence
gets the same noise. The tokens are drawn by the Gumbel-max trick in its exponential form: with E_x independent
exponential variables, ``argmin E_x / p_x`` has exactly the distribution p.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quasar.errors import NumericalError

_TOKEN, _TOKEN_ANEW, _ACCEPT, _SEED = range(4)
"""Independent streams of noise at one position: to draw a token, to draw it anew, to accept or reject, to seed."""


@attrs.frozen(kw_only=True)
class Sampling:
    """The distribution to decode from, and the noise to draw with, seen from one position of a sequence.

    Args:
        temperature: Divides the logits; 0 puts all probability on the largest (the lowest id of several).
        top_k: Keep the k largest logits.
        top_p: Then keep the most probable tokens that together reach p.
        min_p: Then keep tokens at least this times as probable as the most probable.
        seed: Of the noise.
        position: Absolute index, in prompt and output, of the token that row 0 of the logits predicts.
        wants_probs: The policy judges a draft by the probabilities it was drawn from, so a drafter that has some gives
            them and draws with noise of its own (see :meth:`apart`).

    The order of the cuts and their rules for ties are those of transformers' logits warpers, which do them.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    position: int = 0
    wants_probs: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether the seed makes no difference."""
        return self.temperature == 0

    def at(self, position: int) -> Sampling:
        """The same, seen from another position."""
        return attrs.evolve(self, position=position)

    def probabilities(self, logits: Tensor) -> Tensor:
        """``[n, V]`` logits, or one row ``[V]``, to probabilities of the same shape in float64."""
        rows = logits if logits.dim() == 2 else logits.unsqueeze(0)
        if self.is_greedy:
            probs = torch.zeros(rows.shape, dtype=torch.float64, device=rows.device)
            probs.scatter_(1, rows.argmax(dim=1, keepdim=True), 1.0)
        else:
            probs = self._warpers()(None, rows.to(torch.float64)).softmax(dim=1)
        return probs.reshape(logits.shape)

    def draw(self, probs: Tensor, row: int, *, anew: bool = False) -> int:
        """Draw a token from ``[V]`` probabilities with the noise of the position ``row`` after this one.

        Args:
            anew: With noise that is independent of what a drafter may have drawn its token with at that position;
                rejection needs that, coupling must not have it.
        """
        return int(self._scores(probs, row, _TOKEN_ANEW if anew else _TOKEN).argmax())

    def choose(self, logits: Tensor, row: int = 0) -> int:
        """The target's own token from ``[V]`` logits, with the noise of the position ``row`` after this one."""
        check_choosable(logits)
        return best_token(logits) if self.is_greedy else self.draw(self.probabilities(logits), row)

    def margin(self, logits: Tensor, row: int = 0) -> float:
        """By how many nats :meth:`choose` prefers its token to the runner-up: how much the logits may err."""
        scores = logits if self.is_greedy else self._scores(self.probabilities(logits), row, _TOKEN)
        best = scores.topk(2).values
        return float(best[0] - best[1])

    def uniform(self, row: int) -> float:
        """A number in [0, 1), independent of what :meth:`draw` uses at the same position."""
        return float(self._noise(row, _ACCEPT).random())

    def uniforms(self, n: int) -> list[float]:
        """Numbers in [0, 1) to judge n tokens at once with, those of this position alone.

        Where the judgement of a token depends on later ones, a number of a position that was judged and not reached is
        no longer uniform: what begins at another position must have others.
        """
        return [float(number) for number in self._noise(0, _ACCEPT).random(n)]

    def apart(self) -> Sampling:
        """The same distribution with noise that this position alone has, to draw one draft with.

        For drafts whose probabilities are judged: the noise of a token that was drafted and not reached is no longer
        independent of what was emitted, where the judgement of a token depended on later ones.
        """
        return attrs.evolve(self, seed=int(self._noise(0, _SEED).integers(2**63)))

    def _scores(self, probs: Tensor, row: int, stream: int) -> Tensor:
        """``[V]`` log-probabilities with Gumbel noise; the largest is the token that is drawn."""
        race = self._noise(row, stream).standard_exponential(probs.shape[0])
        return torch.from_numpy(race).to(probs.device).log_().neg_().add_(probs.log())

    def _noise(self, row: int, stream: int) -> np.random.Generator:
        key = (self.seed % 2**64, 4 * (self.position + row) + stream)
        return np.random.Generator(np.random.Philox(key=np.array(key, dtype=np.uint64)))

    def _warpers(self) -> Callable[..., Tensor]:
        warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(float(self.temperature))]
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            warpers.append(TopPLogitsWarper(float(self.top_p)))
        if self.min_p is not None:
            warpers.append(MinPLogitsWarper(self.min_p))
        return LogitsProcessorList(warpers)


def best_token(logits: Tensor) -> int:
    """The first of the largest of ``[V]`` logits."""
    return int(_on_one_thread(logits).argmax())


def largest(logits: Tensor) -> list[float]:
    """The largest of each row of ``[n, V]`` logits; NaN if there is one."""
    rows = _on_one_thread(logits)
    return rows.amax(dim=-1).tolist() if isinstance(rows, Tensor) else [float(row.max()) for row in rows]


def _on_one_thread(logits: Tensor) -> Tensor | np.ndarray[Any, Any]:
    """An array on a CPU, and the tensor elsewhere.

    torch would wake its threads for a whole vocabulary, and they spin for a while afterwards, in the way of the threads
    of a compiled verifier: its next step then takes up to twice as long. One thread is as fast for a row.
    """
    return logits.detach().numpy() if logits.device.type == "cpu" and logits.dtype in _NUMPY_DTYPES else logits


_NUMPY_DTYPES = (torch.float32, torch.float64)


def is_choosable(logits: Tensor) -> bool:
    """Whether a token can be chosen from ``[V]`` logits: the largest is neither NaN nor infinite."""
    return -float("inf") < largest(logits.unsqueeze(0))[0] < float("inf")


def check_choosable(logits: Tensor) -> None:
    """Raise :class:`NumericalError` where no token can be chosen: the verifier's own rows are checked before."""
    if not is_choosable(logits):
        raise NumericalError("the logits processors leave no token to choose from")
