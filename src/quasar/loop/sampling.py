"""How a token is chosen from logits, and the noise with which it is.

Noise is keyed by seed and absolute position: whatever is drafted, whatever else is decoded, position n of the sequence
gets the same noise for each token. How a token is drawn with it stands in :mod:`quasar.loop.noise`.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from quasar.loop.cuts import Cuts
from quasar.loop.noise import Floats, Ids, Noise, best_of_race
from quasar.loop.rows import HostRows, NoTokenError, Rows, as_array, best_place, best_places

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
        seed: Seed of the noise.
        position: Absolute index, in prompt and output, of the token that row 0 of the logits predicts.
        wants_probs: The policy judges a draft by the probabilities it was drawn from, so a drafter that has some gives
            them and draws with noise of its own (see :meth:`apart`).

    The order of the cuts and their rules for ties are those of transformers' logits warpers; see
    :mod:`quasar.loop.cuts`.
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
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            position=position,
            wants_probs=self.wants_probs,
        )  # once a step: attrs.evolve takes ten times as long

    def choose_rows(self, logits: Rows, offsets: Sequence[int] | None = None) -> Choices:
        """The target's own token of each row, computed when it is asked for.

        Args:
            logits: ``[n, V]``, or rows ``[V]``. Rows on a device come to the CPU in one transfer.
            offsets: How many positions after this one the token of each row stands; ``None``: 0 … n-1, as in a chain.
        """
        return Choices(self, logits, range(len(logits)) if offsets is None else offsets)

    def choose(self, logits: Tensor, row: int = 0) -> int:
        """The target's own token from ``[V]`` logits, with the noise of the position ``row`` after this one.

        Raises:
            NoTokenError: The largest is NaN or infinite.
        """
        return self.chosen(as_array(logits), row)

    def chosen(self, logits: Floats, row: int = 0) -> int:
        """The same of an array."""
        best = best_place(logits)
        return best if self.is_greedy else int(self._leaders(logits, row, 1)[0][0])

    def margin(self, logits: Tensor, row: int = 0) -> float:
        """By how many nats :meth:`choose` prefers its token to the runner-up: how much the logits may err."""
        array = as_array(logits)
        best_place(array)
        scores = -np.sort(-array)[:2] if self.is_greedy else self._leaders(array, row, 2)[1]
        return float(scores[0]) - float(scores[1]) if len(scores) > 1 else float("inf")

    def probabilities(self, logits: Tensor) -> Tensor:
        """``[n, V]`` logits, or one row ``[V]``, to probabilities of the same shape in float64, on the same device.

        Raises:
            NoTokenError: The largest of a row is NaN or infinite.
        """
        rows = HostRows(logits if logits.dim() == 2 else logits.unsqueeze(0))
        probs = np.stack([self.distribution(rows[i]) for i in range(len(rows))])
        return torch.from_numpy(probs).reshape(logits.shape).to(logits.device)

    def distribution(self, logits: Floats) -> Floats:
        """``[V]`` probabilities in float64 of one row."""
        best = best_place(logits)
        probs = np.zeros(len(logits))
        if self.is_greedy:
            probs[best] = 1.0
            return probs
        cuts = self._cuts
        ids = cuts.kept(logits)
        weights = cuts.weights(logits if ids is None else logits[ids], float(logits[best]))
        weights /= weights.sum()
        if ids is None:
            return weights
        probs[ids] = weights
        return probs

    def draw(self, probs: Tensor, row: int, *, anew: bool = False) -> int:
        """Draw a token from ``[V]`` probabilities with the noise of the position ``row`` after this one.

        Args:
            anew: With noise that is independent of what a drafter may have drawn its token with at that position;
                rejection needs that, coupling must not have it.
        """
        return self.drawn(as_array(probs), row, anew=anew)

    def drawn(self, probs: Floats, row: int, *, anew: bool = False) -> int:
        """The same of an array."""
        with np.errstate(divide="ignore"):
            logprobs = np.log(probs, dtype=np.float64)
        best_place(logprobs)
        noise = self._noise_of(row, _TOKEN_ANEW if anew else _TOKEN, len(logprobs))
        return int(best_of_race(logprobs, 1.0, noise)[0][0])

    def uniform(self, row: int) -> float:
        """A number in [0, 1), independent of what :meth:`draw` uses at the same position."""
        return float(self._generator(row, _ACCEPT).random())

    def uniforms(self, n: int) -> list[float]:
        """Numbers in [0, 1) to judge n tokens at once with, those of this position alone.

        Where the judgement of a token depends on later ones, a number of a position that was judged and not reached is
        no longer uniform: what begins at another position must have others.
        """
        return [float(number) for number in self._generator(0, _ACCEPT).random(n)]

    def apart(self) -> Sampling:
        """The same distribution with noise that this position alone has, to draw one draft with.

        For drafts whose probabilities are judged: the noise of a token that was drafted and not reached is no longer
        independent of what was emitted, where the judgement of a token depended on later ones.
        """
        return attrs.evolve(self, seed=int(self._generator(0, _SEED).integers(2**63)))

    @property
    def _cuts(self) -> Cuts:
        return Cuts(self.temperature, self.top_k, self.top_p, self.min_p)

    def _leaders(self, logits: Floats, row: int, n: int) -> tuple[Ids, Floats]:
        """The n tokens that lead the race at the position ``row`` after this one."""
        ids = self._cuts.kept(logits)
        noise = self._noise_of(row, _TOKEN, len(logits))
        return best_of_race(logits if ids is None else logits[ids], self.temperature, noise, ids, n)

    def _noise_of(self, row: int, stream: int, n: int) -> Noise:
        return Noise(self._key(row, stream), n)

    def _generator(self, row: int, stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=np.array(self._key(row, stream), dtype=np.uint64)))

    def _key(self, row: int, stream: int) -> tuple[int, int]:
        return self.seed % 2**64, 4 * (self.position + row) + stream


class Choices(Sequence[int]):
    """The target's own tokens by row; a row that nobody asks for costs nothing.

    Raises, where a row is asked for:
        NoTokenError: Its largest logit is NaN or infinite.
    """

    def __init__(self, sampling: Sampling, logits: Rows, offsets: Sequence[int]) -> None:
        self._sampling = sampling
        self._offsets = offsets
        self._rows = HostRows(logits)
        on_device = isinstance(logits, Tensor) and logits.device.type != "cpu"
        self._best = best_places(logits) if on_device and sampling.is_greedy else None  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, number: int) -> int:  # type: ignore[override]  # no slices: a row at a time
        if self._best is not None and self._best[number] >= 0:
            return self._best[number]
        return self._sampling.chosen(self._rows[number], self._offsets[number])


__all__ = ["Choices", "NoTokenError", "Sampling"]
