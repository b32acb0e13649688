"""Does an acceptance policy keep the protocol, and what it declares? One call: :func:`check_policy`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from quasar.errors import InvalidRequestError
from quasar.loop.decode import speculate
from quasar.loop.decoding import Decoding
from quasar.loop.sampling import Sampling
from quasar.loop.stopping import Stopping
from quasar.protocols import AcceptancePolicy, VerifySession
from quasar.registry.registry import default_registry
from quasar.testing.chi_square import check_frequencies
from quasar.testing.fakes import TableLM
from quasar.testing.running import for_all, global_random_state_kept, require
from quasar.testing.strategies import drafts
from quasar.types import Draft, Verdict, Verification

_V = 5
_DRAWS = 1000
_LENGTH = 3
_HOWS = (
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=1.0, top_k=2),
    Sampling(temperature=1.6, top_p=0.6),
    Sampling(temperature=1.0, min_p=0.4),
)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def check_policy(policy: str | AcceptancePolicy, *, examples: int = 100) -> None:
    """Check that a policy keeps its protocol and, if it declares itself lossless, that it is.

    A verdict keeps tokens that were drafted and adds one that the target may say; nothing is mutated; no global random
    state is used; the same noise gives the same verdict. Lossless: at temperature 0 what is kept and added is the
    target's argmax (the lowest id of several); above, with ``drafter_invariant``, the target's own token of the
    position's noise; without, whole outputs have the target's distribution, over fixed seeds, with drafters whose
    tokens are drawn from their probabilities and with certain ones.

    Args:
        policy: Spec string or AcceptancePolicy.
        examples: How many examples of each property are drawn.

    Raises:
        ConformanceError: A rule is broken; the message says which, and how.
        PluginError: Its signatures do not fit.
    """
    built: AcceptancePolicy = default_registry().build("policy", policy)
    who = type(built).__name__
    hows = [how for how in _HOWS if _takes(built, how)]
    require(bool(hows), f"{who} refuses every way of sampling, greedily and otherwise")

    @for_all(examples, drafts(_V, max_tokens=20), st.integers(0, 9999), st.sampled_from(hows), st.sampled_from(_DTYPES))
    def keeps_the_protocol(draft: Draft, seed: int, how: Sampling, dtype: torch.dtype) -> None:
        sampling = attrs.evolve(how, seed=seed, position=seed)
        logits = _logits(len(draft) + 1, seed).to(dtype)
        if seed % 2:
            draft = _as_said(draft, logits, sampling)
        with global_random_state_kept(who):
            verdict = _decide(built, draft, logits, sampling)
            require(verdict == _decide(built, draft, logits, sampling), f"{who}: two verdicts on one draft differ")
        check_verdict(built, verdict, draft, logits, sampling)

    if built.lossless and not built.drafter_invariant:
        for how in (how for how in hows if not how.is_greedy):
            for certain in (True, False):
                check_distribution(built, how, certain=certain)


def _takes(policy: AcceptancePolicy, how: Sampling) -> bool:
    try:
        policy.decide(Draft(()), Verification(torch.eye(_V)[:1]), how)
    except InvalidRequestError:
        return False
    return True


def _as_said(draft: Draft, logits: Tensor, sampling: Sampling) -> Draft:
    """The draft with the target's own tokens but for the last one: what a good drafter gives."""
    own = [sampling.choose(row, i) for i, row in enumerate(logits[: len(draft)])]
    return Draft([*own[:-1], *draft.token_ids[-1:]]) if own else draft


def _logits(n: int, seed: int) -> Tensor:
    """``[n, V]`` with ties, and with tokens that must not be said."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(3, (n, _V), generator=generator).double()
    logits[torch.rand((n, _V), generator=generator) < 0.2] = -float("inf")
    logits[:, seed % _V] = 1.0
    return logits


def _decide(policy: AcceptancePolicy, draft: Draft, logits: Tensor, sampling: Sampling) -> Verdict:
    shown = logits.clone()
    probs = None if draft.probs is None else draft.probs.clone()
    verdict = policy.decide(draft, Verification(shown), sampling)
    who = type(policy).__name__
    require(torch.equal(shown, logits), f"{who} changed the logits that it was shown")
    if probs is not None and draft.probs is not None:
        require(torch.equal(probs, draft.probs), f"{who} changed the probabilities of the draft")
    return verdict


def check_verdict(policy: AcceptancePolicy, verdict: Verdict, draft: Draft, logits: Tensor, sampling: Sampling) -> None:
    """Check one verdict: within the draft and the vocabulary, and the target's own choice where that is declared."""
    who, n = type(policy).__name__, verdict.n_accepted
    require(
        0 <= n <= len(draft) and 0 <= verdict.next_token < _V,
        f"{who} returned {verdict} for a draft of {len(draft)} tokens and a vocabulary of {_V}",
    )
    emitted = verdict.committed(draft)
    if not policy.lossless:
        return
    said = [float(logits[row, token_id]) for row, token_id in enumerate(emitted)]
    require(
        not any(map(math.isinf, said)), f"{who} emits {emitted}, of which a token has logit -inf and cannot be said"
    )
    if sampling.is_greedy or policy.drafter_invariant:
        own = tuple(sampling.choose(logits[row], row) for row in range(len(emitted)))
        how = "argmax" if sampling.is_greedy else "own choice with the same noise"
        require(emitted == own, f"{who} emits {emitted}, the target's {how} is {own}")


class _FixedDrafter:
    """Drafts k tokens drawn from the same probabilities everywhere; or, if ``certain``, always token 0."""

    needs: frozenset[str] = frozenset()

    def __init__(self, probs: Sequence[float], k: int, *, certain: bool) -> None:
        self.probs, self.k, self.certain = torch.tensor(probs, dtype=torch.float64), k, certain

    def start(self, prompt_ids: Sequence[int], sampling: Sampling, target: VerifySession) -> _FixedSession:
        return _FixedSession(self, len(prompt_ids), sampling)


class _FixedSession:
    def __init__(self, options: _FixedDrafter, length: int, sampling: Sampling) -> None:
        self._options, self._length, self._sampling = options, length, sampling

    def propose(self, max_tokens: int) -> Draft:
        k = min(self._options.k, max_tokens)
        if self._options.certain or k == 0:
            return Draft([0] * k)
        noise, probs = self._sampling.at(self._length).apart(), self._options.probs
        return Draft([noise.draw(probs, row) for row in range(k)], probs.repeat(k, 1))

    def commit(self, token_ids: Sequence[int], verification: Verification) -> None:
        self._length += len(token_ids)


def check_distribution(policy: AcceptancePolicy, how: Sampling, *, certain: bool) -> None:
    """Whole outputs of a few tokens over many seeds: their joint distribution is the target's.

    Args:
        how: Temperature and cuts.
        certain: With a drafter that is always certain of one token; otherwise with one that draws, as often wrong as
            right.
    """
    target = TableLM(3, seed=5, levels=3, order=1)
    drafter = _FixedDrafter((0.6, 0.3, 0.1), 2, certain=certain)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(_DRAWS):
        one = Decoding(
            [0],
            drafter=drafter,
            policy=policy,
            verifier=target,
            sampling=attrs.evolve(how, seed=seed),
            stopping=Stopping(_LENGTH + 2),
        )
        counts[tuple(token_id for step in speculate(one) for token_id in step.emission.token_ids)[:_LENGTH]] += 1
    probs = {}
    for tokens in itertools.product(range(3), repeat=_LENGTH):
        rows = (target.row((0, *tokens[:i])) for i in range(_LENGTH))
        probs[tokens] = math.prod(
            float(how.probabilities(row)[token_id]) for row, token_id in zip(rows, tokens, strict=True)
        )
    drawn = "certain" if certain else "drawn"
    check_frequencies(counts, probs, f"{type(policy).__name__}: outputs with {drawn} drafts are not the target's")
