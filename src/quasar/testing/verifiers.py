"""Does a verifier keep the protocol, and what it declares? One call: :func:`check_verifier`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from quasar.drafters.none import EmptyDrafter
from quasar.errors import UnsupportedModelError
from quasar.loop.checks import check_every_row, checked_verification, start_verifying
from quasar.protocols import Verifier
from quasar.registry.registry import default_registry
from quasar.testing.models import tiny
from quasar.testing.running import for_all, global_random_state_kept, other_defaults, require, run_settings
from quasar.testing.sessions import PlainDecoding, Sequence, check_row, session_machine
from quasar.testing.strategies import token_ids
from quasar.types import EMPTY_DRAFT, Draft
from quasar.weights.layers import structure_copy
from quasar.weights.linear import quantized_layers

_STEPS = 16
_COMPARED, _AT_ONCE = 64, 7
_LONG_DRAFTS = (20, 20, 63)
_ROOM = 2 + sum(_LONG_DRAFTS) + len(_LONG_DRAFTS)
_FLOAT = {torch.float64: 1e-6, torch.float32: 1e-4}
_ROUNDED = 0.15
"""How far logits may be from the model's, as root mean square in units of their standard deviation.

Where activations are rounded to integers, or to 16 bits by the model, last bits become whole rounding steps.
"""


def check_verifier(verifier: str | Verifier, model: Any = None, *, examples: int = 25) -> None:
    """Check that a verifier keeps its protocol, by a state machine over its sessions and by looking ahead.

    Rows of a draft are those of plain decoding, as exactly as ``invariance`` declares; a later token of a draft moves
    no bit of an earlier row; what is not committed is rolled back; sessions do not disturb each other; a session with
    a past says what a new one says; logits are the caller's to keep; no global random state is used. Unless it lists
    ``approximations``, its logits are those of a plain forward of the model, up to rounding. Torch's default dtype and
    device change nothing.

    Args:
        verifier: A Verifier, or a spec string, which is built over ``model``.
        model: A causal LM; ``None``: a tiny random Llama for a spec string. A verifier that is given as an object must
            be that model's.
        examples: A budget: at most so many runs of the state machine, of at most 16 steps each, and so many pairs of
            drafts that differ in their last token. What else is checked takes as many calls whatever it is.

    Raises:
        ConformanceError: A rule is broken; the message says which, and how.
        PluginError: Its signatures, or what it returns, do not fit.
    """
    arguments = (tiny("llama") if model is None else model,) if isinstance(verifier, str) else ()
    built: Verifier = default_registry().build("verifier", verifier, *arguments)
    who, vocab_size = type(built).__name__, built.vocab_size
    require(isinstance(vocab_size, int) and vocab_size > 0, f"{who}: vocab_size={vocab_size!r}")
    require(
        built.max_length is None or (isinstance(built.max_length, int) and built.max_length > 0),
        f"{who}: max_length={built.max_length!r}, expected a positive integer or None",
    )
    check_needs(built)
    if arguments or model is not None:
        check_computes(built, arguments[0] if arguments else model)
    check_defaults(built, lambda: default_registry().build("verifier", verifier, *arguments))
    run_state_machine_as_test(
        session_machine(built), settings=settings(run_settings(examples), stateful_step_count=_STEPS)
    )

    check_long(built)

    @for_all(examples, token_ids(vocab_size), token_ids(vocab_size, max_size=6), st.integers(1, max(1, vocab_size - 1)))
    def later_tokens_move_no_earlier_row(prompt: tuple[int, ...], draft: tuple[int, ...], shift: int) -> None:
        other = (*draft[:-1], (draft[-1] + shift) % vocab_size)
        with global_random_state_kept(who):
            rows = [first_rows(built, prompt, tokens) for tokens in (draft, other)]
        require(
            torch.equal(rows[0], rows[1]),
            f"{who}: the last token of a draft changes logits of positions before it "
            f"(by {float((rows[0] - rows[1]).abs().max()):.2g}); a row may depend on what precedes it only",
        )


def first_rows(verifier: Verifier, prompt: tuple[int, ...], draft: tuple[int, ...]) -> torch.Tensor:
    """``[k, V]``: all rows of a draft of k tokens but the one that its last token decides."""
    session = start_verifying(verifier, list(prompt), frozenset())
    verification = checked_verification(session.verify(Draft(draft)), Draft(draft), verifier)
    check_every_row(verification, verifier)
    return verification.logits[:-1].clone()


def check_needs(verifier: Verifier) -> None:
    """Features come as one row a position where they were asked for, or are refused at the start.

    A row is that of its own position: the one that plain decoding has there, up to rounding.
    """
    name = "hidden:-1"
    needs, prompt = frozenset({name}), [0, 1 % verifier.vocab_size]
    try:
        session = verifier.start(prompt, needs)
    except UnsupportedModelError:
        return
    draft = [token_id % verifier.vocab_size for token_id in (2, 3)]
    hidden = session.verify(Draft(draft)).features.get(name)
    shape = None if hidden is None else list(hidden.shape)
    require(
        hidden is not None and hidden.dim() == 2 and len(hidden) == 3,
        f"{type(verifier).__name__} was started for a drafter that needs {name!r} and returned {shape}; expected "
        "[k+1, D], or UnsupportedModelError from start",
    )
    assert hidden is not None
    alone = verifier.start(prompt, needs)
    for row, token_id in enumerate((*draft, None)):
        expected = alone.verify(EMPTY_DRAFT).features[name]
        scale = float(expected.double().abs().max())
        apart = float((hidden[row].double() - expected[0].double()).abs().max())
        require(
            scale > 0 and apart <= 0.1 * scale,
            f"{type(verifier).__name__}: row {row} of the features of a draft is not that of its position",
        )
        if token_id is not None:
            alone.commit([token_id])


def check_computes(verifier: Verifier, model: Any) -> None:
    """Without approximations that are declared, logits are those of a plain forward of the model, up to rounding."""
    if verifier.approximations:
        return
    length = min(_COMPARED, verifier.max_length or _COMPARED)
    tokens = torch.randint(
        verifier.vocab_size, (length,), device="cpu", generator=torch.Generator().manual_seed(1)
    ).tolist()
    evaluated = model if not model.training else structure_copy(model).eval()
    expected = torch.stack([_plain_row(evaluated, tokens[:n]) for n in range(length // 2, length)])
    session, rows = start_verifying(verifier, tokens[: length // 2], frozenset()), []
    for begin in range(length // 2, length, _AT_ONCE):
        draft = Draft(tokens[begin : begin + _AT_ONCE])
        rows.append(session.verify(draft).logits[:-1].double().cpu())
        session.commit(draft.token_ids)
    found = torch.cat(rows)
    apart = float((found - expected).square().mean().sqrt() / expected.std().clamp_min(1e-30))
    rounds = any(layer.activations != "none" for layer in quantized_layers(model).values())
    allowed = _ROUNDED if rounds else _FLOAT.get(model.dtype, _ROUNDED)
    require(
        apart <= allowed,
        f"{type(verifier).__name__} lists no approximations, and its logits differ from the model's by {apart:.2g} of "
        f"their standard deviation, where rounding explains {allowed:g}",
    )


def check_defaults(verifier: Verifier, build: Callable[[], Verifier]) -> None:
    """Under another default dtype and device of the process it is built the same, and says the same."""
    prompt, draft = (0, 1 % verifier.vocab_size), tuple(token_id % verifier.vocab_size for token_id in (2, 3, 4, 5))
    expected = first_rows(verifier, prompt, draft)
    for when in ("", "built and "):
        with other_defaults():
            found = first_rows(build() if when else verifier, prompt, draft)
        require(
            torch.equal(found, expected),
            f"{type(verifier).__name__}: {when}run under another default dtype of torch, its logits differ; name the "
            "dtype and the device of every tensor that is made",
        )


@torch.no_grad()
def _plain_row(model: Any, token_ids: list[int]) -> torch.Tensor:
    """``[V]`` of a forward over these tokens and no others: some models look at the length of a call."""
    given = torch.tensor([token_ids], dtype=torch.int64, device=model.device)
    row: torch.Tensor = model(input_ids=given, use_cache=False).logits[0, -1].double().cpu()
    return row


def check_long(verifier: Verifier) -> None:
    """Drafts of 20 and 63 tokens: rows are still those of plain decoding, and lists stay as they were."""
    room = min(_ROOM, verifier.max_length or _ROOM)
    sequence = Sequence(verifier, EmptyDrafter(), (0,))
    plain = PlainDecoding(verifier)
    generator = torch.Generator().manual_seed(0)
    for k in _LONG_DRAFTS:
        if (n := min(k, room - sequence.length - 1)) < 1:
            break
        draft = Draft(torch.randint(verifier.vocab_size, (n,), device="cpu", generator=generator).tolist())
        plain.row(sequence.prompt, (*sequence.token_ids, *draft.token_ids))  # remembers all that follow
        verification = checked_verification(sequence.session.verify(draft), draft, verifier)
        check_every_row(verification, verifier)
        logits = verification.logits
        for i, row in enumerate(logits):
            expected = plain.row(sequence.prompt, (*sequence.token_ids, *draft.token_ids[:i]))
            check_row(verifier, row, expected, f"at position {i} of {len(draft) + 1}")
        committed = [*draft.token_ids, 0]
        sequence.session.commit(committed)
        changed = committed != [*draft.token_ids, 0]
        require(not changed, f"{type(sequence.session).__name__} changed the tokens that were committed to it")
        sequence.token_ids += tuple(committed)
