"""One generation in progress: an iterator of chunks that ends with a result."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from quasar.errors import InvalidRequestError
from quasar.loop.decoding import PlainDecoding
from quasar.loop.noise import Floats
from quasar.loop.rows import as_array
from quasar.loop.stop_strings import TextStream
from quasar.types import Chunk, FinishReason, GenerationResult, Step, TokenLogprobs

if TYPE_CHECKING:
    from typing_extensions import Self


class Generation(Iterator[Chunk]):
    """Streams chunks; their texts and tokens add up to those of :attr:`result`. Made by :class:`quasar.Pipeline`.

    One that is left before its end is closed, by :meth:`close` or as a context manager, and then lets go of its
    key-value caches. It belongs to one thread at a time.
    """

    def __init__(
        self,
        steps: Iterator[Step],
        one: PlainDecoding,
        *,
        text: TextStream | None,
        guarantee: str,
        logprobs: int | None = None,
    ) -> None:
        self._steps, self._one = steps, one
        self._n_logprobs = logprobs
        self._logprobs: list[TokenLogprobs] = []
        self._text = text
        self._guarantee = guarantee
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._broken_off: str | None = None
        self._running = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the generation here and let go of its sequence; once it has ended, there is nothing to do.

        Raises:
            InvalidRequestError: Another thread waits for its next chunk.
        """
        with self._alone():
            self._broken_off = "was closed before its end"
            if isinstance(self._steps, Generator):
                self._steps.close()
            self._steps = iter(())
            self._one.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._running.acquire(blocking=False):
            raise InvalidRequestError("another thread is in this generation; let one thread at a time iterate over it")
        try:
            yield
        finally:
            self._running.release()

    def __next__(self) -> Chunk:
        with self._alone():
            if self._finish_reason is None and self._broken_off is not None:
                raise InvalidRequestError(f"the generation {self._broken_off}; start another one")
            try:
                return self._advance()
            except StopIteration:
                raise
            except BaseException as error:
                self._broken_off = f"ended with {type(error).__name__}"
                raise

    def _advance(self) -> Chunk:
        with self._one.stats.total:
            step = next(self._steps)
            emission = step.emission
            self._finish_reason = emission.finish_reason
            self._token_ids.extend(emission.token_ids)
            if self._n_logprobs is not None:
                self._logprobs += logprobs_of(step, self._n_logprobs)
            chunk = Chunk(self._new_text(), emission.token_ids)
            self._pieces.append(chunk.text)
        return chunk

    def _new_text(self) -> str:
        if self._text is None:
            return ""
        return self._text.advance() if self._finish_reason is None else self._text.finish(self._one.stopping.text_end)

    @property
    def result(self) -> GenerationResult:
        """The whole output, once the iterator is exhausted.

        Raises:
            InvalidRequestError: The generation has not ended.
        """
        if self._finish_reason is None:
            state = self._broken_off or "has not ended"
            raise InvalidRequestError(f"the generation {state}; iterate over one to its end first")
        return GenerationResult(
            text="".join(self._pieces),
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason,
            guarantee=self._guarantee,
            stats=self._one.stats.as_dict(),
            logprobs=None if self._n_logprobs is None else tuple(self._logprobs),
        )

    def run(self) -> GenerationResult:
        """Run to the end."""
        for _ in self:
            pass
        return self.result


def logprobs_of(step: Step, n: int) -> Iterator[TokenLogprobs]:
    """The log-probabilities of the tokens of one step, each from the row that judged it."""
    for i, token_id in enumerate(step.emission.token_ids):
        yield logprob_of(token_id, as_array(step.verification.rows[i]), n)


def logprob_of(token_id: int, logits: Floats, n: int) -> TokenLogprobs:
    """The log-probability of one token, and those of the n most probable, of one row of ``[V]`` logits."""
    peak = logits.max()
    total = float(peak) + math.log(float(np.exp(logits - peak).sum()))
    n = min(n, len(logits))
    place = len(logits) - n
    best = np.argpartition(logits, place)[place:] if n else np.array([], dtype=np.intp)
    best = best[np.lexsort((best, -logits[best]))]
    top = {int(i): float(logits[i]) - total for i in best}
    return TokenLogprobs(float(logits[token_id]) - total, top)
