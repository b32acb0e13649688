"""Does a drafter keep the protocol? One call: :func:`check_drafter`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from quasar.loop.checks import bind_drafter, checked_draft, is_bindable, prefill, start_drafting, start_verifying
from quasar.loop.decode import reference_decode, speculate
from quasar.loop.decoding import Decoding, PlainDecoding
from quasar.loop.sampling import Sampling
from quasar.loop.stopping import Stopping
from quasar.policies.coupled import CoupledPolicy
from quasar.protocols import Drafter, DraftSession, Verifier
from quasar.registry.registry import default_registry
from quasar.testing.chi_square import check_frequencies
from quasar.testing.fakes import TableLM
from quasar.testing.models import tiny
from quasar.testing.running import for_all, global_random_state_kept, require
from quasar.testing.strategies import Turn, dialogues, token_ids
from quasar.types import Draft
from quasar.verifiers.causal_lm import CausalLMVerifier

DrafterLike = str | Drafter | Callable[[list[int], int], Iterable[int]]

_SAMPLINGS = (
    Sampling(temperature=1.0, seed=7, wants_probs=True),
    Sampling(temperature=1.0, seed=7),
    Sampling(seed=7),
)
_DRAWS = 600
_MANY = 50


def check_drafter(
    drafter: DrafterLike, *, target: Verifier | None = None, model: Any = None, examples: int = 50
) -> None:
    """Check that a drafter keeps its protocol, over random prompts and random outcomes of its drafts.

    A draft is legal, with probabilities (if any) that are distributions, one row a token, from which the tokens were
    really drawn; sessions do not disturb each other; the caller's lists and tensors are left alone; no global random
    state is used; a ``restart`` leaves nothing of what was before; and decoding with it gives the target's own tokens.
    A drafter that declares ``remembers = True`` need not propose the same again.

    Args:
        drafter: Spec string, Drafter, or a function ``(token_ids, k) -> token ids``.
        target: What its drafts are verified by; ``None``: a random table over 40 tokens. Needed where the drafter
            knows a vocabulary.
        model: A causal LM that a drafter with ``bind`` is bound to, and its target; ``None``: a tiny random Llama.
        examples: How many examples of each property are drawn.

    Raises:
        ConformanceError: A rule is broken; the message says which, and how.
        PluginError: Its signatures, or what it returns, do not fit.
    """
    built: Drafter = default_registry().build("drafter", drafter)
    who = type(built).__name__
    lm: Verifier = TableLM(40, levels=4) if target is None else target
    if is_bindable(built):
        model = tiny("llama") if model is None else model
        built, lm = _bind(built, model), CausalLMVerifier(model)
    remembers = getattr(built, "remembers", False) is True
    prompts = token_ids(lm.vocab_size, max_size=max(1, min(8, (lm.max_length or 99) - 1)))
    turns = dialogues(lm.vocab_size)

    @for_all(examples, prompts, turns, st.sampled_from(_SAMPLINGS))
    def keeps_the_protocol(prompt: tuple[int, ...], turns: tuple[Turn, ...], sampling: Sampling) -> None:
        with global_random_state_kept(who):
            first = play(built, lm, prompt, turns, sampling)
            again = play(built, lm, prompt, turns, sampling)
        require(
            remembers or _same(first, again),
            f"{who}: two sessions with one prompt and one seed propose different drafts",
        )

    @for_all(examples, prompts, turns, prompts, turns)
    def sessions_are_independent(
        prompt: tuple[int, ...], turns: tuple[Turn, ...], other: tuple[int, ...], others: tuple[Turn, ...]
    ) -> None:
        alone = play(built, lm, prompt, turns)
        interleaved = play(built, lm, prompt, turns, meanwhile=(other, others))
        require(
            remembers or _same(alone, interleaved),
            f"{who}: a session proposes otherwise when another one is used in between",
        )

    @for_all(examples, prompts, turns, prompts)
    def restarts_are_complete(prompt: tuple[int, ...], turns: tuple[Turn, ...], new: tuple[int, ...]) -> None:
        if not remembers:
            check_restart(built, lm, prompt, turns, new)

    if not remembers:
        check_draws(built, lm)

    @for_all(examples, prompts, st.integers(1, 20), st.sampled_from([0.0, 1.0]))
    def output_is_the_targets(prompt: tuple[int, ...], n: int, temperature: float) -> None:
        check_output(built, lm, prompt, n, Sampling(temperature=temperature, seed=3))


def _bind(drafter: Drafter, model: Any) -> Drafter:
    """Bind to a model, which must be the same afterwards."""
    who, training = type(drafter).__name__, model.training
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with global_random_state_kept(f"{who}.bind"):
        bound = bind_drafter(drafter, model, None, None)
    after = model.state_dict()
    kept = after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    require(kept and model.training == training, f"{who}.bind changed the model that it was bound to")
    return bound


def play(
    drafter: Drafter,
    target: Verifier,
    prompt: tuple[int, ...],
    turns: Sequence[Turn],
    sampling: Sampling = _SAMPLINGS[0],
    *,
    meanwhile: tuple[tuple[int, ...], Sequence[Turn]] | None = None,
) -> list[Draft]:
    """The drafts of one session over the given turns; with ``meanwhile``, another session takes turns with it."""
    one = _Sequence(drafter, target, prompt, sampling)
    other = None if meanwhile is None else _Sequence(drafter, target, meanwhile[0], sampling)
    drafts = []
    for i, turn in enumerate(turns):
        drafts.append(one.take(turn))
        if other is not None and meanwhile is not None and i < len(meanwhile[1]):
            other.take(meanwhile[1][i])
    one.check_untouched()
    return drafts


class _Sequence:
    """A draft session and the target that judges it, as the loop would hold them."""

    def __init__(self, drafter: Drafter, target: Verifier, prompt: tuple[int, ...], sampling: Sampling) -> None:
        self._who, self._target = type(drafter).__name__, target
        self._given = (list(prompt), list(prompt))
        self._shown: list[tuple[Tensor, Tensor]] = []
        self._verifying = start_verifying(target, prompt, drafter.needs)
        prefill(self._verifying)
        self.drafting: DraftSession = start_drafting(drafter, self._given[0], sampling, self._verifying)
        self._room = (target.max_length or 10**9) - len(prompt)

    def take(self, turn: Turn) -> Draft:
        """One step of a loop, of the outcome that ``turn`` says."""
        max_tokens = min(turn.max_tokens, self._room - 1)
        if max_tokens < 0:
            return Draft(())
        draft = checked_draft(self.drafting.propose(max_tokens), max_tokens, self.drafting, self._target)
        _check_probs(self._who, draft)
        verification = self._verifying.verify(draft)
        self._shown += [(tensor, tensor.clone()) for tensor in (verification.logits, *verification.features.values())]
        kept = draft.token_ids[: min(turn.n_kept, len(draft))]
        committed = [*kept, turn.next_token]
        self._verifying.commit(committed)
        self.drafting.commit(committed, verification)
        self._room -= len(committed)
        require(committed == [*kept, turn.next_token], f"{self._who} changed the tokens that were committed to it")
        return draft

    def check_untouched(self) -> None:
        """What was given to the drafter is as it was."""
        require(self._given[0] == self._given[1], f"{self._who} changed the prompt that it was started with")
        kept = all(torch.equal(shown, copy) for shown, copy in self._shown)
        require(kept, f"{self._who} changed the logits or features that it was shown")


def _check_probs(who: str, draft: Draft) -> None:
    if (probs := draft.probs) is None:
        return
    require(bool((probs >= 0).all()), f"{who}: probabilities of a draft are negative or not numbers")
    sums = probs.double().sum(dim=1).tolist()
    allowed = 1e-3 if probs.dtype in (torch.float32, torch.float64) else 2e-2
    require(
        all(abs(total - 1) < allowed for total in sums), f"{who}: rows of a draft's probs sum to {sums}, expected 1"
    )
    own = probs[range(len(draft)), list(draft.token_ids)].tolist()
    require(all(p > 0 for p in own), f"{who}: its own tokens {draft.token_ids} have probabilities {own} in its probs")


def check_restart(
    drafter: Drafter, target: Verifier, prompt: tuple[int, ...], turns: Sequence[Turn], new: tuple[int, ...]
) -> None:
    """After ``restart(new)`` a used session proposes what one that is started with ``new`` does, also later on."""
    used = _Sequence(drafter, target, prompt, _SAMPLINGS[0])
    if not hasattr(used.drafting, "restart"):
        return
    for turn in turns:
        used.take(turn)
    used.drafting.restart(list(new))
    fresh = _Sequence(drafter, target, new, _SAMPLINGS[0])
    for turn in turns:
        limit = min(turn.max_tokens, fresh._room - 1, 4)
        if limit < 0:
            return
        drafts = [
            session.propose(limit).clipped(limit, target.vocab_size) for session in (used.drafting, fresh.drafting)
        ]
        n = min(map(len, drafts))  # a session may have learnt how long its drafts should be
        require(
            drafts[0].token_ids[:n] == drafts[1].token_ids[:n],
            f"{type(drafter).__name__}: after restart({list(new)}) a session proposes {drafts[0].token_ids}, where one "
            f"that is started so proposes {drafts[1].token_ids}",
        )
        verification = fresh._verifying.verify(Draft(()))
        fresh._verifying.commit([turn.next_token])
        for session in (used.drafting, fresh.drafting):
            session.commit([turn.next_token], verification)
        fresh._room -= 1


def check_draws(drafter: Drafter, target: Verifier) -> None:
    """Over seeds, each token of two drafts is distributed as their probabilities say, given all tokens before it."""
    prompt = [token_id % target.vocab_size for token_id in (1, 2, 3, 1, 2)]
    if (target.max_length or 99) < len(prompt) + 8:
        return
    drawn: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    probs: dict[tuple[int, ...], Tensor] = {}
    for seed in range(_DRAWS):
        verifying = start_verifying(target, prompt, drafter.needs)
        prefill(verifying)
        session = start_drafting(drafter, prompt, Sampling(temperature=1.0, seed=seed, wants_probs=True), verifying)
        history: tuple[int, ...] = ()
        for _ in range(2):
            draft = checked_draft(session.propose(2), 2, session, target)
            if draft.probs is None or not len(draft):
                return
            for row, token_id in enumerate(draft.token_ids):
                probs.setdefault(history, draft.probs[row])
                drawn[history][token_id] += 1
                history += (token_id,)
            verification = verifying.verify(draft)
            verifying.commit([0])
            session.commit([0], verification)
            history += (-1,)  # where one draft ends and the next begins
    for history, counts in drawn.items():
        if sum(counts.values()) >= _MANY:
            expected = dict(enumerate(probs[history].double().tolist()))
            what = (
                f"{type(drafter).__name__}: the tokens it drafts after drafting {history} are not drawn from its probs"
            )
            check_frequencies(counts, expected, what)


def check_output(drafter: Drafter, target: Verifier, prompt: tuple[int, ...], n: int, sampling: Sampling) -> None:
    """Decoding with the drafter gives the tokens of the target alone."""
    room = (target.max_length or 10**9) - len(prompt)
    budget = min(n, room)
    alone = PlainDecoding(prompt, verifier=target, sampling=sampling, stopping=Stopping(budget))
    expected = [token_id for step in reference_decode(alone) for token_id in step.emission.token_ids]
    drafted = Decoding(
        prompt,
        drafter=drafter,
        policy=CoupledPolicy(),
        verifier=target,
        sampling=sampling,
        stopping=Stopping(budget),
    )
    tokens = [token_id for step in speculate(drafted) for token_id in step.emission.token_ids]
    require(tokens == expected, f"{type(drafter).__name__}: output {tokens} differs from the target's own {expected}")


def _same(one: Sequence[Draft], other: Sequence[Draft]) -> bool:
    return [draft.token_ids for draft in one] == [draft.token_ids for draft in other]
