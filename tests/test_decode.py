"""Losslessness of the loop: greedy output equals the target's own for any drafter, any stop, any budget."""

from __future__ import annotations

from collections import Counter

import attrs
import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from quasar.drafters.function import FunctionDrafter
from quasar.drafters.ngram import NgramDrafter
from quasar.drafters.none import EmptyDrafter
from quasar.errors import NumericalError, PluginError
from quasar.loop.decode import reference_decode, speculate
from quasar.loop.decoding import Decoding, PlainDecoding
from quasar.loop.detokenize import IncrementalText
from quasar.loop.processing import Processing
from quasar.loop.sampling import Sampling
from quasar.loop.stats import DecodeStats
from quasar.loop.stopping import Stopping
from quasar.policies.block import BlockPolicy
from quasar.policies.coupled import CoupledPolicy
from quasar.policies.greedy import GreedyPolicy
from quasar.policies.margin import MarginPolicy
from quasar.policies.rejection import RejectionPolicy
from quasar.policies.typical import TypicalPolicy
from quasar.testing.fakes import TableLM, TableSession, scripted
from quasar.testing.running import examples
from quasar.types import EMPTY_DRAFT, Draft, Emission, Verdict, Verification
from strategies import Case, cases


def stopping_of(case: Case, kind: type[Stopping] = Stopping) -> Stopping:
    return kind(
        case.max_new_tokens,
        eos_token_ids=case.eos_token_ids,
        stop=case.stop,
        criteria=case.criteria(),
        text=IncrementalText(case.tokenizer()),
    )


def run(prompt_ids, *, drafter, verifier, policy, stopping, stats=None, sampling=None, processors=()) -> list[Emission]:
    """All emissions of the loop; greedy unless ``sampling`` is given."""
    steps = speculate(
        Decoding(
            prompt_ids,
            drafter=drafter,
            verifier=verifier,
            policy=policy,
            sampling=sampling or Sampling(),
            stopping=stopping,
            processing=Processing(prompt_ids, processors),
            stats=stats or DecodeStats(),
        )
    )
    return [step.emission for step in steps]


def speculative(case: Case, *, target=None, drafter=None, policy=None, stopping=None, sampling=None):
    stats = DecodeStats()
    emissions = run(
        case.prompt_ids,
        drafter=drafter or FunctionDrafter(case.drafter()),
        verifier=target or case.target(),
        policy=policy or GreedyPolicy(),
        sampling=sampling,
        stopping=stopping or stopping_of(case),
        stats=stats,
    )
    return emissions, stats


def plain(case: Case, sampling: Sampling | None = None) -> list[Emission]:
    steps = reference_decode(
        PlainDecoding(
            case.prompt_ids,
            verifier=case.target(),
            sampling=sampling or Sampling(),
            stopping=stopping_of(case),
            processing=Processing(case.prompt_ids),
            stats=DecodeStats(),
        )
    )
    return [step.emission for step in steps]


def tokens_of(emissions: list[Emission]) -> list[int]:
    return [token_id for emission in emissions for token_id in emission.token_ids]


def by_hand(case: Case) -> tuple[list[int], str]:
    """Greedy decoding and its stops in the most naive way: all tokens first, then the first position that stops."""
    tokenizer = case.tokenizer()
    eos = {None: ()}.get(case.eos_token_ids, case.eos_token_ids)
    eos = (eos,) if isinstance(eos, int) else eos
    token_ids: list[int] = []
    for token_id in case.target().greedy(case.prompt_ids, case.max_new_tokens):
        token_ids.append(token_id)
        before, text = tokenizer.decode(token_ids[:-1]), tokenizer.decode(token_ids)
        if token_id in eos:
            return token_ids, "eos"
        if any(stop in text and stop not in before for stop in case.stop):
            return token_ids, "stop"
        if any(criterion(token_ids) for criterion in case.criteria()):
            return token_ids, "stop"
    return token_ids, "length"


def holds(case: Case, **parts: object) -> bool:
    """The property: the same tokens and the same reason to end as plain decoding."""
    emissions, _ = speculative(case, **parts)
    return (tokens_of(emissions), emissions[-1].finish_reason) == by_hand(case)


def test_any_drafter_gives_the_tokens_of_plain_decoding():
    """Equality with reference_decode and with decoding by hand, for all stops; and everything interesting occurred."""
    seen: Counter[str] = Counter()

    @given(cases())
    @examples(1500)
    def check(case: Case) -> None:
        target = case.target()
        emissions, stats = speculative(case, target=target)
        reference = plain(case)
        assert tokens_of(emissions) == tokens_of(reference)
        assert emissions[-1].finish_reason == reference[-1].finish_reason
        assert (tokens_of(emissions), emissions[-1].finish_reason) == by_hand(case)
        assert all(emission.finish_reason is None for emission in emissions[:-1])
        assert stats.emitted_tokens == len(tokens_of(emissions)) == stats.accepted_tokens + stats.steps - _cut(stats)
        (session,) = target.sessions
        emitted = len(emissions[-1].token_ids)
        seen["several tokens accepted at once"] += any(len(e.token_ids) > 2 for e in emissions)
        seen["rollback"] += session.rollbacks > 0
        seen["draft of 16"] += max(session.widths) == 17
        seen["empty draft"] += 1 in session.widths[:-1]
        for reason in ("eos", "stop", "length"):
            ends_inside = emissions[-1].finish_reason == reason and emitted > 1 and session.widths[-1] > emitted
            seen[f"{reason} in the middle of a draft"] += ends_inside
        seen["eos, but not at once"] += emissions[-1].finish_reason == "eos" and len(emissions) > 2

    check()
    for event in (
        "several tokens accepted at once",
        "rollback",
        "draft of 16",
        "empty draft",
        "eos in the middle of a draft",
        "stop in the middle of a draft",
        "eos, but not at once",
    ):
        assert seen[event] >= 3, (event, seen)


def _cut(stats: DecodeStats) -> int:
    """1 if the last step ended inside its draft: then its last token is an accepted one, and none was added."""
    return stats.accepted_tokens + stats.steps - stats.emitted_tokens


def test_a_step_emits_its_accepted_tokens_and_one_more_unless_a_stop_cuts_it():
    """committed = accepted + exactly one; only the last step may end on an accepted token."""

    @given(cases())
    def check(case: Case) -> None:
        _, stats = speculative(case)
        assert _cut(stats) in (0, 1)

    check()


@pytest.mark.parametrize("k", [0, 1, 2, 4, 7, 12, 16])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 16, 40])
def test_an_oracle_needs_the_fewest_steps_there_can_be(k, max_new_tokens):
    """Verify forwards = ceil(n / (k + 1)); the cached length is one less than the committed at the end."""
    target = TableLM(50, seed=3)
    prompt = (1, 2, 3)
    output = target.greedy(prompt, max_new_tokens)
    stats = DecodeStats()
    emissions = run(
        prompt,
        drafter=FunctionDrafter(scripted(len(prompt), output, k)),
        verifier=target,
        policy=GreedyPolicy(),
        stopping=Stopping(max_new_tokens),
        stats=stats,
    )
    assert tokens_of(emissions) == output
    assert stats.steps == -(-max_new_tokens // (k + 1))
    assert stats.drafted_tokens == stats.accepted_tokens == max_new_tokens - stats.steps
    assert len(target.sessions[0].cached) == len(prompt) + max_new_tokens - 1


@pytest.mark.parametrize(("bad", "k", "steps"), [(1, 4, 40), (3, 4, 14), (3, 7, 14)])
def test_a_drafter_that_is_sometimes_wrong_needs_the_steps_it_deserves(bad, k, steps):
    """40 tokens: always wrong 40 steps, every third token wrong 14."""
    target = TableLM(50, seed=5)
    output = target.greedy((9,), 40)
    stats = DecodeStats()
    emissions = run(
        (9,),
        drafter=FunctionDrafter(scripted(1, output, k, bad, vocab_size=50)),
        verifier=target,
        policy=GreedyPolicy(),
        stopping=Stopping(40),
        stats=stats,
    )
    assert tokens_of(emissions) == output
    assert stats.steps == steps


def test_ngram_and_empty_drafters_are_lossless_too():
    """The built-in drafters keep the property, and prompt lookup does get tokens accepted."""
    accepted = 0

    @given(cases())
    def check(case: Case) -> None:
        nonlocal accepted
        for drafter in (NgramDrafter(), NgramDrafter(k=16, max_n=2), EmptyDrafter()):
            emissions, stats = speculative(case, drafter=drafter)
            assert (tokens_of(emissions), emissions[-1].finish_reason) == by_hand(case)
            accepted += stats.accepted_tokens

    check()
    assert accepted > 100


@pytest.mark.parametrize("eos_at", range(16))
def test_an_eos_anywhere_in_a_draft_is_the_last_token(eos_at):
    """Wherever in an accepted draft the EOS falls, it is emitted once and nothing after it."""
    target = TableLM(1000, seed=11)
    output = target.greedy((1, 2), 40)
    eos = output[eos_at]
    emissions = run(
        (1, 2),
        drafter=FunctionDrafter(scripted(2, output, 7)),
        verifier=target,
        policy=GreedyPolicy(),
        stopping=Stopping(40, eos_token_ids=[eos, 999_999]),
        stats=DecodeStats(),
    )
    assert tokens_of(emissions) == output[: output.index(eos) + 1]


class AcceptsOneTooMany(GreedyPolicy):
    def decide(self, draft: Draft, verification: Verification, sampling: Sampling) -> Verdict:
        verdict = super().decide(draft, verification, sampling)
        n = min(verdict.n_accepted + 1, len(draft))
        return Verdict(n, int(verification.logits[n].argmax()))


class BonusFromTheRowBefore(GreedyPolicy):
    def decide(self, draft: Draft, verification: Verification, sampling: Sampling) -> Verdict:
        n = super().decide(draft, verification, sampling).n_accepted
        return Verdict(n, int(verification.logits[max(n - 1, 0)].argmax()))


class TiesToTheHighestId(GreedyPolicy):
    def decide(self, draft: Draft, verification: Verification, sampling: Sampling) -> Verdict:
        return super().decide(draft, Verification(_reversed_ties(verification.logits)), sampling)


def _reversed_ties(logits: torch.Tensor) -> torch.Tensor:
    return logits + 1e-6 * torch.arange(logits.shape[-1])


class LooksAtTheLastTokenOnly(Stopping):
    def truncate(self, token_ids):
        *accepted, last = token_ids
        token_ids = tuple(accepted)
        for token_id in accepted:
            self._reason_to_end_at(token_id)
        return Emission((*token_ids, last), self._reason_to_end_at(last) if self.remaining > 0 else "length")


class ForgetsToRollBack(TableLM):
    def start(self, prompt_ids, needs=frozenset()):
        return KeepsRejectedToken(self, prompt_ids)


class KeepsRejectedToken(TableSession):
    def commit(self, token_ids):
        keep = self.committed_length + len(token_ids)  # one more than committed - 1
        del self.cached[keep:]
        self.committed_length += len(token_ids)
        self.kept, self.last = len(self.cached), token_ids[-1]


PLANTED_BUGS = {
    "accepts one token too many": lambda case: {"policy": AcceptsOneTooMany()},
    "bonus token from the row before": lambda case: {"policy": BonusFromTheRowBefore()},
    "ties go to the highest id": lambda case: {"policy": TiesToTheHighestId()},
    "stops are looked for at the end of a draft only": lambda case: {
        "stopping": stopping_of(case, LooksAtTheLastTokenOnly)
    },
    "a rejected token stays cached": lambda case: {
        "target": ForgetsToRollBack(case.vocab_size, seed=case.seed, levels=case.levels)
    },
}


@pytest.mark.parametrize("bug", PLANTED_BUGS)
def test_the_property_finds_the_planted_bug(bug):
    """Each bug breaks the property for some case, so the property can fail."""
    as_found = settings(examples(3000), phases=[Phase.generate])  # making a case smaller takes longer than finding it
    case = find(cases(), lambda case: not holds(case, **PLANTED_BUGS[bug](case)), settings=as_found)
    assert holds(case)


def test_drafts_are_cut_at_the_budget_and_at_the_vocabulary():
    """What exceeds max_tokens, or follows an id that the target does not have, is never verified."""
    draft = Draft([1, 2, 3, 9, 4], probs=torch.eye(5))
    assert draft.clipped(2, vocab_size=100).token_ids == (1, 2)
    assert draft.clipped(10, vocab_size=9).token_ids == (1, 2, 3)
    assert draft.clipped(10, vocab_size=9).probs.shape == (3, 5)
    assert draft.clipped(10, vocab_size=10) is draft
    assert draft.clipped(-1, vocab_size=10).token_ids == ()
    assert Draft([-1, 2]).clipped(5, vocab_size=10).token_ids == ()


class OneRow(TableLM):
    """Returns logits for one position whatever the draft."""

    def start(self, prompt_ids, needs=frozenset()):
        session = super().start(prompt_ids, needs)
        verify = session.verify
        session.verify = lambda draft: Verification(verify(draft).logits[:1])
        return session


def test_logits_of_the_wrong_shape_name_the_verifier_and_both_shapes():
    """A verifier that returns too few rows is named, with what was expected."""
    with pytest.raises(PluginError, match=r"OneRow returned logits of shape \[1, 9\], expected .* = \[4, 9\]"):
        list(
            run(
                (1,),
                drafter=FunctionDrafter(lambda token_ids, k: [1, 2, 3]),
                verifier=OneRow(9),
                policy=GreedyPolicy(),
                stopping=Stopping(8),
                stats=DecodeStats(),
            )
        )


@pytest.mark.parametrize("policy", [CoupledPolicy(), RejectionPolicy(), BlockPolicy(), MarginPolicy(), TypicalPolicy()])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_without_a_finite_maximum_is_an_error_where_decoding_comes_to_it_and_nowhere_else(value, policy):
    """It never becomes a token, verifier and row are named; behind a token that is not kept, nobody needs it."""
    own = TableLM(9, seed=3).greedy((1, 2), 6)
    wrong = (own[1] + 1) % 9

    class Broken(TableLM):
        at: tuple[int, ...]

        def row(self, context):
            row = super().row(context)
            return torch.full_like(row, value) if tuple(context) == self.at else row

    def output(at: tuple[int, ...]) -> list[int]:
        broken = Broken(9, seed=3)
        broken.at = at
        drafter = FunctionDrafter(lambda token_ids, k: [own[0], wrong, 3, 4] if len(token_ids) == 2 else [])
        parts = {"drafter": drafter, "policy": policy, "stopping": Stopping(6), "stats": DecodeStats()}
        return tokens_of(run((1, 2), verifier=broken, **parts))

    assert output((1, 2, own[0], wrong)) == own
    for n in range(2):
        with pytest.raises(NumericalError, match=rf"Broken returned logits .* is {value} in row {n} of 5"):
            output((1, 2, *own[:n]))


def test_a_masked_token_is_no_error():
    """-inf for some tokens of a row is how a constraint looks; the rest is chosen from."""
    verification = Verification(torch.tensor([[-float("inf"), 1.0, -float("inf")]]))
    assert GreedyPolicy().decide(EMPTY_DRAFT, verification, Sampling()) == Verdict(0, 1)


@pytest.mark.parametrize("verdict", [Verdict(-1, 1), Verdict(9, 1), Verdict(1, 9), Verdict(0, -1)])
def test_a_verdict_beyond_draft_or_vocabulary_names_the_policy(verdict):
    """A policy cannot keep tokens that were not drafted, nor add one that does not exist."""

    class Wild(GreedyPolicy):
        def decide(self, draft: Draft, verification: Verification, sampling: Sampling) -> Verdict:
            return verdict

    with pytest.raises(PluginError, match=r"Wild returned Verdict.* n_accepted in 0…3 and next_token in 0…8"):
        list(
            run(
                (1,),
                drafter=FunctionDrafter(lambda token_ids, k: [1, 2, 3]),
                verifier=TableLM(9),
                policy=Wild(),
                stopping=Stopping(8),
                stats=DecodeStats(),
            )
        )


@pytest.mark.parametrize("proposed", [None, "abc", 7, [None]])
def test_a_function_that_returns_no_tokens_is_named(proposed):
    """A function drafter's slip is its own, not a traceback from inside the loop."""

    def guess(token_ids: list[int], k: int):
        return proposed

    with pytest.raises(PluginError, match=r"drafter guess returned .* expected token ids"):
        FunctionDrafter(guess).start([1], Sampling(), None).propose(3)


@pytest.mark.parametrize("policy", [GreedyPolicy(), CoupledPolicy()])
def test_both_policies_of_auto_are_greedy_at_temperature_zero(policy):
    """``coupled`` at temperature 0 is greedy decoding."""

    @given(cases())
    def check(case: Case) -> None:
        assert holds(case, policy=policy)

    check()


def test_sampling_gives_the_tokens_of_plain_sampling_for_any_drafter():
    """Coupled: the tokens of a seed are those of the target alone, whatever is drafted; and drafts are accepted."""
    seen: Counter[str] = Counter()

    @given(cases(), st.integers(0, 2**62), st.sampled_from([0.3, 1.0, 3.0]), st.none() | st.integers(1, 5))
    @examples(150)
    def check(case: Case, seed: int, temperature: float, top_k: int | None) -> None:
        case = attrs.evolve(case, levels=6)
        sampling = Sampling(temperature=temperature, top_k=top_k, seed=seed)
        own = plain(case, sampling)
        emissions, stats = speculative(case, policy=CoupledPolicy(), sampling=sampling)
        assert tokens_of(emissions) == tokens_of(own)
        assert emissions[-1].finish_reason == own[-1].finish_reason
        seen["accepted"] += stats.accepted_tokens > 1
        seen["rejected"] += stats.accepted_tokens < stats.drafted_tokens
        seen["not greedy"] += tokens_of(own) != tokens_of(plain(case))

    check()
    assert min(seen[event] for event in ("accepted", "rejected", "not greedy")) >= 20, seen


@pytest.mark.parametrize("shape", [(1, 9), (4, 9), (3,)])
def test_probabilities_that_are_not_one_row_a_token_name_the_session(shape):
    """Three drafted tokens need ``[3, V]``."""

    class Sloppy(EmptyDrafter):
        def propose(self, max_tokens: int) -> Draft:
            return Draft([1, 2, 3], probs=torch.ones(shape))

    parts = {"verifier": TableLM(9), "policy": CoupledPolicy(), "stopping": Stopping(8)}
    with pytest.raises(
        PluginError, match=r"Sloppy proposed 3 tokens with probs of shape .* expected \[k, V\] = \[3, V\]"
    ):
        run((1,), drafter=Sloppy(), **parts)
