"""Forwards of several prompts that wait for each other at the entry of each block.

A layer must be quantized for the inputs of all prompts, and no prompt may pass it before it is. So each prompt runs in
a thread of its own, one at a time, and hands over at each block: what is asked of the block is answered by whoever
drives the prompts. All that a model does around its blocks stays as it is, each block is run when its turn comes and no
forward begins anew; what is kept is what a model holds in the midst of a forward, prompt by prompt.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import attrs
import torch
from torch import Tensor, nn

_thread = threading.local()


@attrs.frozen(eq=False)
class Call:
    """What the model asks of a block: to be called by name, with these arguments."""

    block: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _AbandonedError(BaseException):
    """Ends a forward that nobody will drive on; no ``except Exception`` of a model's catches it."""


class Lane:
    """The forward of one prompt. ``call`` is what it waits for; ``None``: it is over.

    Raises:
        Exception: Whatever the model raises, here and in :meth:`answer`.
    """

    def __init__(self, model: nn.Module, token_ids: Tensor) -> None:
        self.call: Call | None = None
        self._calls: SimpleQueue[Call | BaseException | None] = SimpleQueue()
        self._answers: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(model, token_ids), daemon=True)
        self._thread.start()
        self._receive()

    def answer(self, output: Any) -> None:
        """Go on with the output of the block, as far as the entry of the next."""
        self._answers.put(lambda: output)
        self._receive()

    def abandon(self) -> None:
        """End the forward where it is."""
        self._answers.put(_abandon)
        self._thread.join()

    def ask(self, call: Call) -> Any:
        """In the forward's own thread: wait for the output of a block."""
        self._calls.put(call)
        return self._answers.get()()

    def _receive(self) -> None:
        received = self._calls.get()
        if isinstance(received, BaseException):
            raise received
        self.call = received

    def _run(self, model: nn.Module, token_ids: Tensor) -> None:
        _thread.lane = self
        try:
            with torch.no_grad():
                model(input_ids=token_ids, use_cache=False)
            self._calls.put(None)
        except BaseException as error:
            self._calls.put(error)


def _abandon() -> None:
    raise _AbandonedError


@contextmanager
def lanes(model: nn.Module, blocks: Iterable[str], calibration: Sequence[Tensor]) -> Iterator[list[Lane]]:
    """Start all prompts, each as far as the first block; whatever happens, end them all, and leave ``model`` as it was.

    Args:
        model: Its blocks may be replaced, and what is in them, while the prompts wait.
        blocks: Names of modules.
        calibration: ``[1, T]`` integer token ids each.
    """
    modules = {name: model.get_submodule(name) for name in blocks}
    originals = {name: module.__dict__.get("forward") for name, module in modules.items()}
    started: list[Lane] = []
    try:
        for name, module in modules.items():
            module.forward = functools.partial(_ask_or_run, name, module.forward)
        for token_ids in calibration:
            started.append(Lane(model, token_ids))
        yield started
    finally:
        for lane in started:
            lane.abandon()
        for name, module in modules.items():
            del module.forward
            if (original := originals[name]) is not None:
                module.forward = original


def _ask_or_run(block: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of a block: in a lane it is asked for, elsewhere it is run."""
    lane: Lane | None = getattr(_thread, "lane", None)
    return forward(*args, **kwargs) if lane is None else lane.ask(Call(block, args, kwargs))


def run(model: nn.Module, call: Call) -> Any:
    """What the block that stands in the model now answers to a call. Hooks on the block itself run in the lane."""
    return model.get_submodule(call.block).forward(*call.args, **call.kwargs)
