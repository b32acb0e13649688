"""The cascade: an inner loop as a drafter. The output is the outer target's, for any inner target and drafter."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quasar import Pipeline
from quasar.drafters.function import FunctionDrafter
from quasar.drafters.nested import CascadeDrafter, NestedDrafter
from quasar.drafters.ngram import NgramDrafter
from quasar.drafters.none import EmptyDrafter
from quasar.errors import InvalidRequestError
from quasar.loop.sampling import Sampling
from quasar.loop.stats import DecodeStats
from quasar.loop.stopping import Stopping
from quasar.policies.block import BlockPolicy
from quasar.policies.coupled import CoupledPolicy
from quasar.policies.rejection import RejectionPolicy
from quasar.quantizers.none import NoQuantizer
from quasar.testing.fakes import TableLM
from quasar.testing.models import VOCAB_SIZE, greedy, random_prompt, tiny
from quasar.testing.running import examples
from quasar.types import Verification
from quasar.verifiers.causal_lm import CausalLMVerifier
from quasar.weights.layers import linear_layers
from strategies import Case, cases
from test_decode import plain, run, stopping_of, tokens_of
from toys import word_tokenizer


class Perturbed(TableLM):
    """A target that agrees with another one but for some contexts: what quantizing does to a model."""

    def __init__(self, like: TableLM, every: int, **options) -> None:
        super().__init__(like.vocab_size, **options)
        self._like, self._every = like, every

    def row(self, context):
        row = self._like.row(context)
        return row.roll(1) if hash(tuple(context[-2:])) % self._every == 0 else row


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cascade_gives_the_tokens_of_the_outer_target(temperature):
    """Two and three levels, any margin that ends a draft, any stops inside a draft that is rejected."""
    seen: Counter[str] = Counter()

    @examples(200)
    @given(
        cases(),
        st.integers(1, 6),
        st.integers(1, 12),
        st.sampled_from([0, 0.5, 2, 900]),
        st.booleans(),
        st.integers(0, 99),
    )
    def check(case: Case, every: int, k: int, min_margin: float, three: bool, seed: int) -> None:
        sampling = Sampling(temperature=temperature, seed=seed)
        outer = case.target()
        inner = Perturbed(outer, every)
        options = {"k": k, "min_k": 1, "max_k": 16, "min_margin": min_margin}
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
        seen["whole draft confirmed"] += any(len(e.token_ids) > 4 for e in emissions)
        seen["draft rejected in its middle"] += 0 < stats.accepted_tokens < stats.drafted_tokens
        seen["three levels"] += three and stats.accepted_tokens > 3
        seen["ended inside a draft"] += emissions[-1].finish_reason != "length" and len(emissions[-1].token_ids) > 1

    check()
    assert min(seen.values()) >= 10, seen


class RestartableTable(TableLM):
    """Its sessions can restart, as those of the causal LM can; counts what they forget."""

    def start(self, prompt_ids, needs=frozenset()):
        session = super().start(prompt_ids, needs)

        def restart(token_ids):
            session.cached = list(token_ids[:-1])
            session.last, session.committed_length = token_ids[-1], len(token_ids)
            session.kept = len(session.cached)

        session.restart = restart
        return session


def test_a_session_that_can_restart_is_not_started_anew():
    """One inner session for the whole sequence; without ``restart``, one for every draft."""
    outer = TableLM(40, seed=1)
    for kind, sessions in ((RestartableTable, 1), (TableLM, 10)):
        inner = kind(40, seed=1)
        drafter = NestedDrafter(NgramDrafter(), inner, k=4, min_k=4, max_k=4)
        run((1, 2), drafter=drafter, verifier=outer, policy=CoupledPolicy(), stopping=Stopping(50))
        assert len(inner.sessions) == sessions


def test_with_the_same_inner_target_every_draft_is_confirmed():
    """Nothing is rejected; n tokens need ceil(n / (k + 1)) forwards of the outer target."""
    outer, stats = TableLM(40, seed=2), DecodeStats()
    drafter = NestedDrafter(NgramDrafter(), TableLM(40, seed=2), k=9, min_k=9, max_k=9, min_margin=0)
    run((1, 2), drafter=drafter, verifier=outer, policy=CoupledPolicy(), stopping=Stopping(100), stats=stats)
    assert stats.steps == 10
    assert stats.accepted_tokens == stats.drafted_tokens == 90


def test_drafts_grow_while_they_are_confirmed_and_shrink_while_they_are_not():
    """Adaptive between min_k and max_k, session by session; the strategy itself keeps its k."""
    outer = TableLM(40, seed=2)
    for inner, end in ((TableLM(40, seed=2), 32), (TableLM(40, seed=77), 8)):
        drafter = NestedDrafter(NgramDrafter(), inner, k=16, min_margin=0)
        session = drafter.start((1, 2), Sampling(), None)
        stopping = Stopping(400)
        confirmed, proposed = [1, 2], []
        for _ in range(8):
            draft = session.propose(100)
            proposed.append(len(draft))
            rows = outer.greedy(confirmed, len(draft) + 1)
            n = next((i for i, token in enumerate(draft.token_ids) if token != rows[i]), len(draft))
            session.commit(rows[: n + 1], Verification(torch.zeros(1, 40)))
            confirmed += rows[: n + 1]
        assert proposed[0] == 16
        assert proposed[-1] == end
        assert drafter.lengths.k == 16
        assert stopping.remaining == 400


@pytest.mark.parametrize("policy", [RejectionPolicy(), BlockPolicy()])
def test_policies_that_need_draft_probabilities_get_the_inner_targets(policy):
    """What the inner target would have drawn from, row by row; most of it is kept where the models agree."""
    outer = TableLM(6, seed=4, levels=3)
    drafter = NestedDrafter(NgramDrafter(), TableLM(6, seed=4, levels=3), k=6, min_k=6, max_k=6, with_probs=True)
    sampling, stats = Sampling(temperature=1.0, seed=3), DecodeStats()
    draft = drafter.start((1, 2), sampling, None).propose(5)
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


class Hesitant(TableLM):
    """Prefers token 1 everywhere, by a margin that depends on the length of the context alone."""

    def __init__(self, margins: dict[int, float]) -> None:
        super().__init__(3)
        self._margins = margins

    def row(self, context):
        return torch.tensor([0.0, self._margins.get(len(context), 9.0), -50.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("min_margin", "lengths"),
    [(0, [6, 6, 6]), (0.3, [6, 3, 6]), (0.5, [6, 3, 6]), (0.6, [4, 3, 6]), (8.9, [4, 2, 4])],
)
def test_a_narrow_choice_ends_the_draft_with_its_token(min_margin, lengths):
    """Scripted: the tokens after 5, 9, 10 and 17 others are preferred by 0.5, 1, 0.1 and 1, the rest by 9.

    The narrow token is still proposed, and a margin that just reaches the least is none.
    """
    inner = Hesitant({5: 0.5, 9: 1.0, 10: 0.1, 17: 1.0})
    drafter = NestedDrafter(EmptyDrafter(), inner, k=6, min_k=6, max_k=6, min_margin=min_margin)
    session = drafter.start((1, 1), Sampling(), None)
    found = []
    for n_confirmed in (2, 8, 14):
        session.restart([1] * n_confirmed)
        found.append(len(session.propose(100)))
    assert found == lengths


def test_every_token_of_a_step_of_the_inner_loop_may_end_the_draft():
    """With a drafter inside several tokens come at once: the draft ends after the step that has a narrow one in it."""
    inner = Hesitant({5: 0.1})
    drafter = NestedDrafter(FunctionDrafter(lambda ids, k: [1] * min(k, 3)), inner, k=12, min_k=12, max_k=12)
    assert len(drafter.start((1, 1), Sampling(), None).propose(100)) == 4  # contexts of 2, 3, 4 and 5 tokens
    drafter = NestedDrafter(FunctionDrafter(lambda ids, k: [1] * min(k, 1)), inner, k=12, min_k=12, max_k=12)
    assert len(drafter.start((1, 1), Sampling(), None).propose(100)) == 4
    drafter = NestedDrafter(FunctionDrafter(lambda ids, k: [1] * min(k, 2)), inner, k=12, min_k=12, max_k=12)
    assert len(drafter.start((1, 1), Sampling(), None).propose(100)) == 6  # the second step has contexts of 5, 6 and 7


def test_a_sampled_draft_ends_where_the_race_of_its_own_position_was_narrow():
    """By the noise of the absolute position, for drafts that come one by one and several at once."""
    inner = TableLM(5, seed=1, levels=4)
    ended = 0
    for seed in range(40):
        sampling = Sampling(temperature=1.0, seed=seed)
        token_ids = [1, 2]
        while len(token_ids) < 10:
            row, here = inner.row(token_ids), sampling.at(len(token_ids))
            token_ids.append(here.choose(row))
            if here.margin(row) < 0.3:
                break
        ended += len(token_ids) < 10
        options = {"k": 8, "min_k": 8, "max_k": 8, "min_margin": 0.3}
        draft = NestedDrafter(EmptyDrafter(), inner, **options).start((1, 2), sampling, None).propose(100)
        assert [1, 2, *draft.token_ids] == token_ids
        several = FunctionDrafter(lambda ids, k, known=token_ids: known[len(ids) :][:2])
        draft = NestedDrafter(several, inner, **options).start((1, 2), sampling, None).propose(100)
        assert [1, 2, *draft.token_ids][: len(token_ids)] == token_ids
        assert len(draft) - (len(token_ids) - 2) <= 2
    assert 10 < ended < 40


@given(st.lists(st.integers(-8, 8), min_size=2, max_size=8))
def test_the_margin_of_a_greedy_choice_is_the_lead_of_the_best_logit(logits):
    """In nats, for a logit is a log-probability up to a constant."""
    best, second = sorted(logits, reverse=True)[:2]
    assert Sampling().margin(torch.tensor(logits, dtype=torch.float64)) == best - second


ROWS = st.lists(st.floats(-6, 6), min_size=2, max_size=12).map(lambda row: torch.tensor(row, dtype=torch.float64))


@given(ROWS, st.integers(0, 10**6), st.integers(0, 5), st.sampled_from([0.3, 1.0, 2.5]))
def test_the_margin_of_a_sampled_choice_is_the_lead_in_the_race_that_it_won(logits, seed, row, temperature):
    """Raise the runner-up's logit by just less than the lead and the choice stays; by just more, and it is chosen."""
    sampling = Sampling(temperature=temperature, seed=seed, position=7)
    chosen, margin = sampling.choose(logits, row), sampling.margin(logits, row)
    others = logits.clone()
    others[chosen] = -torch.inf
    runner_up = sampling.choose(others, row)
    for share, expected in ((0.999, chosen), (1.001, runner_up)):
        raised = logits.clone()
        raised[runner_up] += temperature * (margin * share + (1e-9 if share > 1 else -1e-9))
        assert sampling.choose(raised, row) == expected


@given(ROWS, st.integers(0, 10**6), st.sampled_from([0.0, 0.7, 1.0]), st.data())
def test_no_error_below_half_the_margin_changes_the_choice(logits, seed, temperature, data):
    """Every log-probability may be off by that much, each in its own direction."""
    sampling = Sampling(temperature=temperature, seed=seed)
    reach = 0.499 * sampling.margin(logits) * (temperature or 1.0)
    directions = data.draw(st.lists(st.floats(-1, 1), min_size=len(logits), max_size=len(logits)))
    error = torch.tensor(directions, dtype=torch.float64) * reach
    assert sampling.choose(logits + error) == sampling.choose(logits)


def test_a_choice_without_a_rival_has_an_infinite_margin():
    """Where a cut leaves one token."""
    assert Sampling(temperature=1.0, top_k=1).margin(torch.tensor([1.0, 2.0, 3.0])) == float("inf")


@pytest.mark.parametrize("options", [{"k": 4}, {"min_k": 30}, {"max_k": 4}])
def test_draft_lengths_out_of_order_are_refused(options):
    """min_k ≤ k ≤ max_k."""
    with pytest.raises(InvalidRequestError, match="expected 1 ≤ min_k ≤ k ≤ max_k"):
        NestedDrafter(NgramDrafter(), TableLM(9), **options)


# The cascade over a model


THREE_LEVELS = "nested:drafter=(nested:drafter=(ngram:k=3,max_n=2),quantizer=(w8a8:lm_head=true),k=8,min_k=1)"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("policy", ["auto", "rejection", "block"])
def test_a_cascade_of_three_levels_gives_the_full_model_s_own_output(family, policy):
    """By spec string: transformers' own greedy tokens, and options that have reached the level they are written at."""
    model, prompt_ids = tiny(family), random_prompt(9)
    pipe = Pipeline.from_model(model, quantizer="none", drafter=f"{THREE_LEVELS},quantizer=w8a8", policy=policy)
    result = pipe.generate_ids(prompt_ids, max_new_tokens=40, eos_token_id=None)
    assert list(result.token_ids) == greedy(model, prompt_ids, 40)
    assert result.stats["accepted_tokens"] > 10
    middle = pipe.drafter.drafter
    assert isinstance(middle, NestedDrafter)
    assert isinstance(middle.drafter, NgramDrafter)
    assert (pipe.drafter.lengths.k, middle.lengths.k, middle.drafter.k) == (24, 8, 3)
    heads = [level.verifier.model.get_output_embeddings() for level in (pipe.drafter, middle)]
    assert [type(head).__name__ for head in heads] == ["FixedPanels", "QuantizedLinear"]


def test_three_levels_sampled_are_the_full_model_s_own_tokens():
    """With the same seed, at every level the same noise."""
    model = tiny("llama")
    asked = {"max_new_tokens": 30, "eos_token_id": None, "temperature": 0.8, "top_p": 0.95, "seed": 4}
    pipe = Pipeline.from_model(model, exact_to="full", drafter=THREE_LEVELS.split("=", 1)[1].strip("()"))
    result = pipe.generate_ids([5, 6, 7], **asked)
    assert result.token_ids == pipe.reference([5, 6, 7], **asked).token_ids
    assert result.stats["accepted_tokens"] > 0


def test_exact_to_full_is_the_nested_drafter_over_the_full_model():
    """One way to build a cascade: the same drafts, counts and tokens, and the description of the quantizer."""
    model, asked = tiny("llama"), {"max_new_tokens": 40, "eos_token_id": None}
    choices = {"tokenizer": word_tokenizer(), "calibration": ["the cat sat on the mat"]}
    short = Pipeline.from_model(model, drafter="ngram:k=3", quantizer="w8a8:alpha=0.6", exact_to="full", **choices)
    spec = "nested:drafter=(ngram:k=3),quantizer=(w8a8:alpha=0.6)"
    long = Pipeline.from_model(model, drafter=spec, quantizer="none", **choices)
    first, second = (pipe.generate_ids(random_prompt(9), **asked) for pipe in (short, long))
    assert first.token_ids == second.token_ids
    names = ("steps", "drafted_tokens", "accepted_tokens")
    assert [first.stats[name] for name in names] == [second.stats[name] for name in names]
    assert short.description["quantization"]["smoothed_layers"] > 0
    weights = [dict(pipe.drafter.verifier.model.named_parameters()) for pipe in (short, long)]
    for name, parameter in weights[0].items():  # the norms are smoothed alike: both were calibrated
        assert torch.equal(parameter, weights[1][name]), name
    assert first.guarantee == second.guarantee
    assert "the model as it was given" in first.guarantee


def storages() -> dict[int, int]:
    """Bytes of every distinct storage that some tensor in this process has."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(("levels", "with_head"), [(2, [False]), (3, [False, True])])
def test_the_levels_share_every_tensor_that_quantizing_does_not_change(family, levels, with_head):
    """A cascade holds the full model once, and for each copy the integers and scales of what that one quantizes."""
    model, before = tiny(family), storages()
    drafter = "ngram" if levels == 2 else "nested:quantizer=(w8a8:lm_head=true,kernel=reference)"
    pipe = Pipeline.from_model(model, quantizer="w8a8:kernel=reference", exact_to="full", drafter=drafter)
    pipe.generate_ids([5, 6, 7], max_new_tokens=3)
    added = {pointer: size for pointer, size in storages().items() if pointer not in before}
    head = model.get_output_embeddings()
    shapes = [layer.weight.shape for layer in linear_layers(model) if layer.module is not head]
    made = [sum(out * width + 4 * out for out, width in shapes) for _ in with_head]
    made[-1] += sum(with_head) * (VOCAB_SIZE * head.weight.shape[1] + 4 * VOCAB_SIZE)
    assert sum(added.values()) == sum(made)
    del pipe


def test_calibration_reaches_a_nested_quantizer_also_where_the_target_is_not_quantized():
    """As prompts of the tokenizer on the model's device; without a tokenizer there are none."""
    seen = []

    class Spy(NoQuantizer):
        def quantize(self, model, calibration=None):
            seen.append((model, calibration))
            return super().quantize(model)

    model = tiny("llama")
    for tokenizer, expected in ((word_tokenizer(), [[[5, 6, 8]], [[7]]]), (None, None)):
        drafter = CascadeDrafter(CascadeDrafter(quantizer=Spy()), Spy())
        choices = {"quantizer": "none", "calibration": ["the cat sat", "dog"]}
        Pipeline.from_model(model, tokenizer, drafter=drafter, **choices)
        for given_model, calibration in seen:
            assert given_model is model
            assert (None if calibration is None else [ids.tolist() for ids in calibration]) == expected
        assert len(seen) == 2
        seen.clear()


def test_one_cascade_drafter_serves_several_models():
    """Binding changes nothing on what was bound: it holds options only."""
    drafter = CascadeDrafter(k=8, min_k=1)
    models = [tiny("llama", seed=seed) for seed in (0, 1)]
    pipes = [Pipeline.from_model(model, quantizer="none", drafter=drafter) for model in models]
    for model, pipe in zip(models, pipes, strict=True):
        result = pipe.generate_ids([5, 6, 7], max_new_tokens=20, eos_token_id=None)
        assert list(result.token_ids) == greedy(model, [5, 6, 7], 20)
        assert result.stats["accepted_tokens"] > 10


def test_a_cascade_without_a_model_is_refused_when_it_is_to_draft():
    """A pipeline that is built on a verifier has none to give."""
    for drafter in ("nested", "nested:quantizer=none", CascadeDrafter()):
        pipe = Pipeline(TableLM(9), drafter=drafter)
        with pytest.raises(InvalidRequestError, match=r"no model to quantize; make the pipeline of a model \(Pipeline"):
            pipe.generate_ids([1, 2], max_new_tokens=3)


def test_a_context_that_a_model_s_positions_end_ends_drafting_only():
    """GPT-2 has no embedding for a position beyond: neither a longer prompt nor a longer output runs into it."""
    target, small = tiny("gpt2"), tiny("gpt2", seed=3, max_position_embeddings=16)
    for length in (5, 15, 16, 17, 40):
        prompt_ids = random_prompt(length)
        drafter = NestedDrafter(NgramDrafter(), CausalLMVerifier(small), k=4, min_k=1, min_margin=0)
        pipe = Pipeline(CausalLMVerifier(target), drafter=drafter)
        result = pipe.generate_ids(prompt_ids, max_new_tokens=30)
        assert list(result.token_ids) == greedy(target, prompt_ids, 30)
        assert (result.stats["drafted_tokens"] > 0) == (length < 16)


def test_a_dead_end_of_the_inner_target_is_no_error_of_the_outer_one():
    """A token after which the inner target says NaN: the draft ends there, and the output is the outer target's."""

    class Poisoned(TableLM):
        def row(self, context):
            return torch.full((9,), torch.nan) if context[-1] == poison else super().row(context)

    outer = TableLM(9, seed=4)
    own = outer.greedy((1, 2), 12)
    poison = own[3]
    for policy in (CoupledPolicy(), RejectionPolicy()):
        drafter = NestedDrafter(EmptyDrafter(), Poisoned(9, seed=4), k=4, min_k=2, max_k=8)
        emissions = run((1, 2), drafter=drafter, verifier=outer, policy=policy, stopping=Stopping(12))
        assert tokens_of(emissions) == own
        assert max(len(emission.token_ids) for emission in emissions) > 1
