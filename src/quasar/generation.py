"""One generation in progress: an iterator of chunks that ends with a result."""

from __future__ import annotations

from collections.abc import Iterator

from quasar.detokenize import TextStream
from quasar.errors import InvalidRequestError
from quasar.stats import DecodeStats
from quasar.stopping import Stopping
from quasar.types import Chunk, Emission, FinishReason, GenerationResult


class Generation(Iterator[Chunk]):
    """Streams chunks; their texts and tokens add up to those of :attr:`result`. Made by :class:`quasar.Pipeline`."""

    def __init__(
        self,
        emissions: Iterator[Emission],
        *,
        stopping: Stopping,
        stats: DecodeStats,
        text: TextStream | None,
        guarantee: str,
    ) -> None:
        self._emissions = emissions
        self._stopping = stopping
        self._stats = stats
        self._text = text
        self._guarantee = guarantee
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._finish_reason: FinishReason | None = None

    def __next__(self) -> Chunk:
        with self._stats.total:
            emission = next(self._emissions)
            self._finish_reason = emission.finish_reason
            self._token_ids.extend(emission.token_ids)
            chunk = Chunk(self._new_text(), emission.token_ids)
            self._pieces.append(chunk.text)
        return chunk

    def _new_text(self) -> str:
        if self._text is None:
            return ""
        return self._text.advance() if self._finish_reason is None else self._text.finish(self._stopping.text_end)

    @property
    def result(self) -> GenerationResult:
        """The whole output, once the iterator is exhausted.

        Raises:
            InvalidRequestError: The generation has not ended.
        """
        if self._finish_reason is None:
            raise InvalidRequestError("the generation has not ended; iterate over it to its end first")
        return GenerationResult(
            text="".join(self._pieces),
            token_ids=tuple(self._token_ids),
            finish_reason=self._finish_reason,
            guarantee=self._guarantee,
            stats=self._stats.as_dict(),
        )

    def run(self) -> GenerationResult:
        """Run to the end."""
        for _ in self:
            pass
        return self.result
