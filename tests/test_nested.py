"""The cascade: an inner loop as a drafter. The output is the outer target's, for any inner target and drafter."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quasar.drafters.function import FunctionDrafter
from quasar.drafters.nested import NestedDrafter
from quasar.drafters.ngram import NgramDrafter
from quasar.errors import InvalidRequestError
from quasar.policies.block import BlockPolicy
from quasar.policies.coupled import CoupledPolicy
from quasar.policies.rejection import RejectionPolicy
from quasar.sampling import Sampling
from quasar.stats import DecodeStats
from quasar.stopping import Stopping
from quasar.testing.fakes import TableLM
from quasar.types import Verification
from strategies import Case, cases
from test_decode import plain, run, stopping_of, tokens_of


class Perturbed(TableLM):
    """A target that agrees with another one but for some contexts: what quantizing does to a model."""

    def __init__(self, like: TableLM, every: int, **options) -> None:
        super().__init__(like.vocab_size, seed=like._seed, levels=like._levels, **options)
        self._like, self._every = like, every

    def row(self, context):
        row = self._like.row(context)
        return row.roll(1) if hash(tuple(context[-2:])) % self._every == 0 else row


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cascade_gives_the_tokens_of_the_outer_target(temperature):
    """Two and three levels, sessions that can restart and that cannot, any stops inside a block that is rejected."""
    seen: Counter[str] = Counter()

    @settings(max_examples=400)
    @given(cases(), st.integers(1, 6), st.integers(1, 12), st.booleans(), st.integers(0, 99))
    def check(case: Case, every: int, k: int, three: bool, seed: int) -> None:
        sampling = Sampling(temperature=temperature, seed=seed)
        outer = case.target()
        inner = Perturbed(outer, every)
        options = {"k": k, "min_k": 1, "max_k": 16}
        drafter = NestedDrafter(FunctionDrafter(case.drafter()), inner, **options)
        if three:
            drafter = NestedDrafter(drafter, Perturbed(outer, every + 1), **options)
        stats = DecodeStats()
        emissions = run(
            case.prompt_ids,
            drafter=drafter,
            verifier=outer,
            policy=CoupledPolicy(),
            sampling=sampling,
            stopping=stopping_of(case),
            stats=stats,
        )
        own = plain(case, sampling)
        assert tokens_of(emissions) == tokens_of(own)
        assert emissions[-1].finish_reason == own[-1].finish_reason
        seen["whole block confirmed"] += any(len(e.token_ids) > 4 for e in emissions)
        seen["block rejected in its middle"] += 0 < stats.accepted_tokens < stats.drafted_tokens
        seen["three levels"] += three and stats.accepted_tokens > 3
        seen["ended inside a block"] += emissions[-1].finish_reason != "length" and len(emissions[-1].token_ids) > 1

    check()
    assert min(seen.values()) >= 10, seen


class RestartableTable(TableLM):
    """Its sessions can restart, as those of the causal LM can; counts what they forget."""

    def start(self, prompt_ids, needs=frozenset()):
        session = super().start(prompt_ids, needs)

        def restart(token_ids):
            session.cached = list(token_ids[:-1])
            session.last, session.committed_length = token_ids[-1], len(token_ids)

        session.restart = restart
        return session


def test_a_session_that_can_restart_is_not_started_anew():
    """One inner session for the whole sequence; without ``restart``, one for every block."""
    outer = TableLM(40, seed=1)
    for kind, sessions in ((RestartableTable, 1), (TableLM, 11)):
        inner = kind(40, seed=1)
        drafter = NestedDrafter(NgramDrafter(), inner, k=4, min_k=4, max_k=4)
        run((1, 2), drafter=drafter, verifier=outer, policy=CoupledPolicy(), stopping=Stopping(50))
        assert len(inner.sessions) == sessions


def test_with_the_same_inner_target_every_block_is_confirmed():
    """Nothing is rejected; n tokens need ceil(n / (k + 1)) forwards of the outer target."""
    outer, stats = TableLM(40, seed=2), DecodeStats()
    drafter = NestedDrafter(NgramDrafter(), TableLM(40, seed=2), k=9, min_k=9, max_k=9)
    run((1, 2), drafter=drafter, verifier=outer, policy=CoupledPolicy(), stopping=Stopping(100), stats=stats)
    assert stats.steps == 10
    assert stats.accepted_tokens == stats.drafted_tokens == 90


def test_blocks_grow_while_they_are_confirmed_and_shrink_while_they_are_not():
    """Adaptive between min_k and max_k, session by session; the strategy itself keeps its k."""
    outer = TableLM(40, seed=2)
    for inner, end in ((TableLM(40, seed=2), 32), (TableLM(40, seed=77), 8)):
        drafter = NestedDrafter(NgramDrafter(), inner, k=16)
        session = drafter.start((1, 2), Sampling())
        stopping = Stopping(400)
        proposed = []
        for _ in range(8):
            draft = session.propose(100)
            proposed.append(len(draft))
            rows = outer.greedy(session._confirmed, len(draft) + 1)
            n = next((i for i, token in enumerate(draft.token_ids) if token != rows[i]), len(draft))
            session.commit(rows[: n + 1], Verification(torch.zeros(1, 40)))
        assert proposed[0] == 16
        assert proposed[-1] == end
        assert drafter.k == 16
        assert stopping.remaining == 400


@pytest.mark.parametrize("policy", [RejectionPolicy(), BlockPolicy()])
def test_policies_that_need_draft_probabilities_get_the_inner_targets(policy):
    """What the inner target would have drawn from, row by row; most of it is kept where the models agree."""
    outer = TableLM(6, seed=4, levels=3)
    drafter = NestedDrafter(NgramDrafter(), TableLM(6, seed=4, levels=3), k=6, min_k=6, max_k=6, with_probs=True)
    sampling, stats = Sampling(temperature=1.0, seed=3), DecodeStats()
    draft = drafter.start((1, 2), sampling).propose(5)
    assert draft.probs.shape == (5, 6)
    token_ids = [1, 2]
    for token_id, probs in zip(draft.token_ids, draft.probs, strict=True):
        assert torch.equal(probs, sampling.probabilities(outer.row(token_ids)))
        token_ids.append(token_id)
    run((1, 2), drafter=drafter, verifier=outer, policy=policy, sampling=sampling, stopping=Stopping(60), stats=stats)
    assert stats.accepted_tokens == stats.drafted_tokens > 0


def test_an_inner_context_that_is_full_ends_drafting_not_decoding():
    """The drafter's model has a shorter context than the target: its drafts become empty, the output goes on."""
    outer = TableLM(9, seed=6)
    drafter = NestedDrafter(NgramDrafter(), TableLM(9, seed=6, max_length=12), k=8)
    emissions = run((1, 2), drafter=drafter, verifier=outer, policy=CoupledPolicy(), stopping=Stopping(40))
    assert tokens_of(emissions) == outer.greedy((1, 2), 40)


@pytest.mark.parametrize("options", [{"k": 0}, {"min_k": 30}, {"max_k": 4}, {"min_k": 0}])
def test_block_lengths_out_of_order_are_refused(options):
    """min_k ≤ k ≤ max_k."""
    with pytest.raises(InvalidRequestError, match="expected 1 ≤ min_k ≤ k ≤ max_k"):
        NestedDrafter(NgramDrafter(), TableLM(9), **options)
