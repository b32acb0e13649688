"""Logits processors under speculation: the same tokens as plain decoding, each position processed once and in order."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import (
    ForcedEOSTokenLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from quasar.drafters.function import FunctionDrafter
from quasar.drafters.none import EmptyDrafter
from quasar.errors import InvalidRequestError, NumericalError, PluginError
from quasar.loop.decode import reference_decode, speculate
from quasar.loop.decoding import Decoding, PlainDecoding
from quasar.loop.penalties import MinNewTokens, NoRepeatNgram, RepetitionPenalty
from quasar.loop.processing import Processing
from quasar.loop.sampling import Sampling
from quasar.loop.stats import DecodeStats
from quasar.loop.stopping import Stopping
from quasar.pipeline.pipeline import Pipeline
from quasar.policies.block import BlockPolicy
from quasar.policies.coupled import CoupledPolicy
from quasar.policies.margin import MarginPolicy
from quasar.policies.rejection import RejectionPolicy
from quasar.policies.typical import TypicalPolicy
from quasar.testing.fakes import TableLM, scripted
from quasar.testing.models import greedy, random_prompt, tiny
from quasar.testing.running import examples
from quasar.types import EMPTY_DRAFT, Draft, Verdict, Verification
from strategies import Case, cases
from test_decode import run, tokens_of
from toys import LooksAhead


class PenalisesWhatItCounted:
    """Stateful: each call counts the last token it sees, and lowers the score of what was counted often."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.dim() == scores.dim() == 2
        self.counts[int(input_ids[0, -1])] += 1
        self.calls += 1
        scores = scores.clone()
        for token_id, count in self.counts.items():
            scores[0, token_id] -= 3 * count
        return scores


def processors_for(case: Case) -> dict[str, list]:
    n = len(case.prompt_ids)
    return {
        "repetition penalty": [RepetitionPenaltyLogitsProcessor(1.3)],
        "no repeated n-gram": [NoRepeatNGramLogitsProcessor(3)],
        "bad words": [NoBadWordsLogitsProcessor([[0, 1], [1]], eos_token_id=[])],
        "min new tokens": [MinNewTokensLengthLogitsProcessor(n, 7, [1])],
        "forced end": [ForcedEOSTokenLogitsProcessor(n + 9, [0])],
        "with a state": [PenalisesWhatItCounted()],
        "several": [PenalisesWhatItCounted(), RepetitionPenaltyLogitsProcessor(2.0), PenalisesWhatItCounted()],
        "a function": [lambda input_ids, scores: scores - (input_ids.shape[1] % 2) * torch.arange(scores.shape[1])],
    }


KINDS = list(processors_for(Case(2, 0, 2, (0,), 1, None, (), None, ())))


def reference(case: Case, processors: list, sampling: Sampling) -> list[int]:
    """Raises NumericalError where the processors leave no token."""
    steps = reference_decode(
        PlainDecoding(
            case.prompt_ids,
            verifier=case.target(),
            sampling=sampling,
            stopping=Stopping(case.max_new_tokens, eos_token_ids=case.eos_token_ids),
            processing=Processing(case.prompt_ids, processors),
            stats=DecodeStats(),
        )
    )
    return tokens_of([step.emission for step in steps])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processed_output_is_that_of_plain_decoding(kind, temperature):
    """Token-identical for any drafter; the processors do change the output, and drafts are accepted under them."""
    seen: Counter[str] = Counter()

    @examples(50)
    @given(cases(), st.integers(0, 1000))
    def check(case: Case, seed: int) -> None:
        sampling = Sampling(temperature=temperature, seed=seed)
        try:
            own = reference(case, processors_for(case)[kind], sampling)
        except NumericalError:
            seen["no token left"] += 1
            return
        stats = DecodeStats()
        emissions = run(
            case.prompt_ids,
            drafter=FunctionDrafter(case.drafter()),
            verifier=case.target(),
            policy=LooksAhead(),
            sampling=sampling,
            stopping=Stopping(case.max_new_tokens, eos_token_ids=case.eos_token_ids),
            processors=processors_for(case)[kind],
            stats=stats,
        )
        assert tokens_of(emissions) == own
        seen["changed"] += own != reference(case, [], sampling)
        seen["accepted"] += stats.accepted_tokens > 0
        seen["rejected"] += stats.accepted_tokens < stats.drafted_tokens

    check()
    assert min(seen[event] for event in ("changed", "accepted", "rejected")) >= 3, seen


def test_a_processor_sees_every_committed_token_once_and_no_rejected_one():
    """The state that is kept is the one at the last committed token; the caller's own object is never called."""
    mine = PenalisesWhatItCounted()
    processing = Processing([5], [mine])
    logits = Verification(torch.zeros(4, 9))
    processing.apply(logits, Draft([1, 2, 3]))
    processing.commit([1, 7])  # one accepted, then the residual
    processing.apply(logits, Draft([4, 4, 4]))
    processing.commit([4, 4, 4, 8])
    (scores,) = processing.apply(Verification(torch.zeros(1, 9)), EMPTY_DRAFT).logits
    assert Counter({token_id: -int(score) // 3 for token_id, score in enumerate(scores) if score}) == Counter(
        {5: 1, 1: 1, 7: 1, 4: 3, 8: 1}
    )
    assert mine.calls == 0


SHORTHANDS = {
    "repetition_penalty": 1.7,
    "no_repeat_ngram_size": 1,
    "min_new_tokens": 9,
}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("settings", [{name: value} for name, value in SHORTHANDS.items()] + [SHORTHANDS], ids=str)
def test_the_shorthands_are_those_of_transformers(family, settings):
    """The tokens of ``generate`` with the same settings, with drafts that are right, wrong and mixed."""
    model, prompt = tiny(family), random_prompt(8)
    end = {"eos_token_id": greedy(model, prompt, 30)[4]} if "min_new_tokens" in settings else {}
    expected = greedy(model, prompt, 30, **settings, **end)
    assert expected != greedy(model, prompt, 30, **end)
    for bad in (0, 1, 3):
        drafter = scripted(len(prompt), expected, k=5, bad=bad, vocab_size=64)
        pipe = Pipeline.from_model(model, quantizer="none", drafter=drafter)
        result = pipe.generate_ids(prompt, max_new_tokens=30, **settings, **(end or {"eos_token_id": None}))
        assert list(result.token_ids) == expected
        assert (result.stats["accepted_tokens"] > 0) == (bad != 1)


class FedRejectedTokens:
    """Planted bug: one shared processor runs over the whole draft."""

    def __init__(self, prompt_ids, processor):
        self.token_ids, self.processor = [*prompt_ids], processor

    def apply(self, verification: Verification, draft: Draft) -> Verification:
        rows = []
        for i in range(len(draft) + 1):
            input_ids = torch.tensor([[*self.token_ids, *draft.token_ids[:i]]])
            rows.append(self.processor(input_ids, verification.logits[i : i + 1]))
        return Verification(torch.cat(rows))

    def commit(self, token_ids):
        self.token_ids += token_ids


def test_a_shared_state_would_be_found():
    """With the planted bug some case differs from plain decoding, so the property can fail."""
    differs = 0

    @examples(40)
    @given(cases())
    def check(case: Case) -> None:
        nonlocal differs
        steps = speculate(
            Decoding(
                case.prompt_ids,
                drafter=FunctionDrafter(case.drafter()),
                verifier=case.target(),
                policy=LooksAhead(),
                sampling=Sampling(),
                stopping=Stopping(case.max_new_tokens),
                processing=FedRejectedTokens(case.prompt_ids, PenalisesWhatItCounted()),
                stats=DecodeStats(),
            )
        )
        case_without_eos = tokens_of([step.emission for step in steps])
        own = reference_decode(
            PlainDecoding(
                case.prompt_ids,
                verifier=case.target(),
                sampling=Sampling(),
                stopping=Stopping(case.max_new_tokens),
                processing=Processing(case.prompt_ids, [PenalisesWhatItCounted()]),
                stats=DecodeStats(),
            )
        )
        differs += case_without_eos != tokens_of([step.emission for step in own])

    check()
    assert differs >= 5


class MasksAll:
    """Leaves no token after ``length`` tokens if the last of them is ``last``."""

    def __init__(self, length: int, last: int) -> None:
        self.length, self.last = length, last

    def __call__(self, input_ids, scores):
        dead = input_ids.shape[1] == self.length and int(input_ids[0, -1]) == self.last
        return torch.full_like(scores, -float("inf")) if dead else scores


def test_no_token_left_is_an_error_where_decoding_comes_to_it_and_nowhere_else():
    """A dead end of a rejected draft is none of the output; one that plain decoding meets is an error on both paths."""
    target = TableLM(9, seed=1)
    own = target.greedy((1,), 6)
    parts = {"verifier": target, "policy": CoupledPolicy(), "stopping": Stopping(6)}
    wrong = FunctionDrafter(lambda token_ids, k: [own[len(token_ids) - 1], (own[len(token_ids)] + 1) % 9, 3, 4])
    aside = MasksAll(3, (own[1] + 1) % 9)
    assert tokens_of(run((1,), drafter=wrong, processors=[aside], **parts)) == own
    for drafter in (wrong, EmptyDrafter(), FunctionDrafter(lambda token_ids, k: own[len(token_ids) - 1 :])):
        parts["stopping"] = Stopping(6)
        with pytest.raises(NumericalError, match="leave no token"):
            run((1,), drafter=drafter, processors=[MasksAll(3, own[1])], **parts)


class HoldsAFile:
    def __init__(self) -> None:
        self.generator = (n for n in range(3))

    def __call__(self, input_ids, scores):
        return scores


@pytest.mark.parametrize(
    ("processor", "message"),
    [(HoldsAFile(), "HoldsAFile has a state that cannot be copied"), (3, "3 is no function of")],
)
def test_what_cannot_be_replayed_is_refused_at_the_start(processor, message):
    """Before anything runs, by name."""
    with pytest.raises(InvalidRequestError, match=message):
        Processing([1], [processor])


# What processors do while they run


class CountsInASubclass(RepetitionPenaltyLogitsProcessor):
    """A subclass of a stateless processor, with a state of its own."""

    def __init__(self) -> None:
        super().__init__(1.2)
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return super().__call__(input_ids, scores) + (torch.arange(scores.shape[1]) * self.calls * 7) % 5


def test_a_subclass_of_a_stateless_processor_has_its_state_by_position():
    """With drafts that are partly wrong the output is that of plain decoding; the caller's object is never called."""
    target, mine = TableLM(9, seed=2), CountsInASubclass()
    parts = {"sampling": Sampling(), "stopping": Stopping(20)}
    expected = [
        token_id
        for step in reference_decode(PlainDecoding((1,), verifier=target, processing=Processing((1,), [mine]), **parts))
        for token_id in step.emission.token_ids
    ]
    drafter = FunctionDrafter(lambda ids, k: [*expected[len(ids) - 1 :][:2], (len(ids) * 5) % 9, 1][:k])
    stats = DecodeStats()
    emissions = run(
        (1,),
        drafter=drafter,
        verifier=target,
        policy=CoupledPolicy(),
        processors=[mine],
        stopping=Stopping(20),
        stats=stats,
    )
    assert tokens_of(emissions) == expected
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert mine.calls == 0


def test_a_processor_that_runs_a_model_gives_what_transformers_gives():
    """Classifier-free guidance with a cache of its own: the state is copied by position, the model is not."""
    model, prompt, negative = tiny("llama"), random_prompt(9), torch.tensor([random_prompt(5, seed=3)])

    def guided() -> UnbatchedClassifierFreeGuidanceLogitsProcessor:
        return UnbatchedClassifierFreeGuidanceLogitsProcessor(1.8, model, unconditional_ids=negative)

    expected = greedy(model, prompt, 24, logits_processor=[guided()])
    assert expected != greedy(model, prompt, 24)
    for bad in (0, 2):
        drafter = scripted(len(prompt), expected, k=4, bad=bad, vocab_size=64)
        pipe = Pipeline.from_model(model, quantizer="none", drafter=drafter)
        result = pipe.generate_ids(prompt, max_new_tokens=24, eos_token_id=None, logits_processors=[guided()])
        assert list(result.token_ids) == expected
        assert result.stats["accepted_tokens"] > 0


class HoldsModels:
    """Wherever a processor may keep a model: in an attribute, a container, a bound method, a partial function."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.inside = model, {"several": [(model, "x")]}
        self.method, self.partial = model.forward, functools.partial(model.forward, 1)
        self.given = id(model)

    def __call__(self, input_ids, scores):
        held = (self.model, self.inside["several"][0][0], self.method.__self__, self.partial.func.__self__)
        assert {id(model) for model in held} == {self.given}
        assert not torch.is_grad_enabled()
        return scores + self.model.weight


def test_a_model_inside_a_processor_is_shared_and_runs_without_gradients():
    """Every copy has the caller's own model, and what it computes holds no graph."""
    model = nn.Linear(9, 1)
    processing = Processing([1], [HoldsModels(model)])
    for _ in range(2):  # by the copies that the first step made, too
        verification = processing.apply(Verification(torch.zeros(3, 9)), Draft([1, 2]))
        assert [row.requires_grad for row in verification.rows] == [False] * 3
        processing.commit([1, 2, 3])


class CannotBeCopiedTwice:
    def __init__(self, copies: int) -> None:
        self.copies = copies

    def __deepcopy__(self, memo):
        if self.copies == 0:
            raise ValueError("no more")
        return CannotBeCopiedTwice(self.copies - 1)

    def __call__(self, input_ids, scores):
        return scores


class RaisesBehind:
    """Fails where it is shown one token."""

    def __init__(self, token_id: int) -> None:
        self.token_id = token_id

    def __call__(self, input_ids, scores):
        if int(input_ids[0, -1]) == self.token_id:
            raise KeyError("unheard of")
        return scores


def test_a_processor_that_fails_is_named_where_decoding_comes_to_it_and_nowhere_else():
    """While it runs and while it is copied; a failure behind a token that was only drafted is none of the output."""
    target = TableLM(9, seed=1)
    own = target.greedy((1,), 6)
    aside = next(token_id for token_id in range(9) if token_id not in {1, *own})
    for policy in (CoupledPolicy(), RejectionPolicy(), BlockPolicy(), MarginPolicy(), TypicalPolicy()):
        parts = {"verifier": target, "policy": policy}
        wrong = FunctionDrafter(lambda token_ids, k: [own[len(token_ids) - 1], aside, 3][:k])
        emissions = run((1,), drafter=wrong, processors=[RaisesBehind(aside)], stopping=Stopping(6), **parts)
        assert tokens_of(emissions) == own
        with pytest.raises(PluginError, match="logits processor RaisesBehind failed: KeyError: 'unheard of'"):
            run((1,), drafter=wrong, processors=[RaisesBehind(own[2])], stopping=Stopping(6), **parts)
        with pytest.raises(InvalidRequestError, match=r"CannotBeCopiedTwice has a state .* ValueError: no more"):
            run((1,), drafter=wrong, processors=[CannotBeCopiedTwice(3)], stopping=Stopping(6), **parts)


class ReadsEverything(CoupledPolicy):
    """A policy as others write it: it looks at all logits at once."""

    def decide(self, draft, verification, sampling):
        best = verification.logits.nan_to_num(-9).argmax(dim=1).tolist()
        n = next(
            (i for i, pair in enumerate(zip(draft.token_ids, best, strict=False)) if pair[0] != pair[1]), len(draft)
        )
        return Verdict(n, best[n])


def test_a_policy_that_reads_all_logits_gets_them_in_nan_behind_a_failure():
    """It need not know that rows are made one by one; a token that it takes from such a row is an error."""
    target = TableLM(9, seed=1)
    own = target.greedy((1,), 6)
    aside = next(token_id for token_id in range(9) if token_id not in {1, *own})
    wrong = FunctionDrafter(lambda token_ids, k: [own[len(token_ids) - 1], aside, 3][:k])
    parts = {"verifier": target, "policy": ReadsEverything(), "drafter": wrong}
    assert tokens_of(run((1,), processors=[RaisesBehind(aside)], stopping=Stopping(6), **parts)) == own
    with pytest.raises(PluginError, match="RaisesBehind failed"):
        run((1,), processors=[RaisesBehind(own[2])], stopping=Stopping(6), **parts)


OURS = {
    "repetition": (RepetitionPenalty(1.7), RepetitionPenaltyLogitsProcessor(1.7)),
    "unigrams": (NoRepeatNgram(1), NoRepeatNGramLogitsProcessor(1)),
    "trigrams": (NoRepeatNgram(3), NoRepeatNGramLogitsProcessor(3)),
    "least": (MinNewTokens(2, 5, [0, 4]), MinNewTokensLengthLogitsProcessor(2, 5, [0, 4])),
}


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@given(
    token_ids=st.lists(st.integers(0, 7), min_size=1, max_size=30),
    row=st.lists(st.floats(-9, 9, width=16), min_size=6, max_size=9),
)
def test_penalties_are_bit_for_bit_those_of_transformers(name, dtype, token_ids, row):
    """For every context, also with ids that the logits do not have."""
    ours, theirs = OURS[name]
    input_ids, scores = torch.tensor([token_ids]), torch.tensor([row]).to(dtype)
    assert torch.equal(ours(input_ids, scores.clone()), theirs(input_ids, scores.clone()))
