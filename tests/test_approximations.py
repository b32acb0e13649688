"""No claim is wider than the truth: what a verifier approximates is named, and never called the full model."""

from __future__ import annotations

import pytest
import torch

from quasar import Pipeline
from quasar.drafters.nested import NestedDrafter
from quasar.drafters.ngram import NgramDrafter
from quasar.errors import InvalidRequestError, PluginError
from quasar.registry.registry import default_registry
from quasar.testing import ConformanceError, check_verifier
from quasar.testing.fakes import TableLM
from quasar.testing.models import tiny
from quasar.types import Verification
from quasar.verifiers.causal_lm import CausalLMVerifier
from toys import tiny_llama

ROUNDED = "keys and values rounded to a tenth"
LONG = {"max_new_tokens": 24, "eos_token_id": None}


class Approximate(CausalLMVerifier):
    """Its logits are a little off, and it says why."""

    approximations = (ROUNDED,)
    size = 1e-2

    def start(self, prompt_ids, needs=frozenset()):
        session = super().start(prompt_ids, needs)
        plain = session.verify

        def verify(draft):
            verification = plain(draft)
            noise = torch.linspace(-self.size, self.size, self.vocab_size, dtype=torch.float32, device="cpu").roll(7)
            return Verification(verification.logits + noise, verification.features)

        session.verify = verify
        return session


class Silent(Approximate):
    """The same, and it does not say so."""

    approximations = ()


def test_what_is_approximated_is_named_in_the_guarantee_and_the_description():
    """In the speculative output as in the reference; the model as it was given is not claimed."""
    pipe = Pipeline.from_model(tiny_llama(), quantizer="none", verifier=Approximate)
    result, reference = pipe.generate_ids([1, 2, 3], **LONG), pipe.reference([1, 2, 3], **LONG)
    assert result.token_ids == reference.token_ids
    assert result.guarantee.startswith(
        f"quantized: the tokens equal those of the model as it was given, with {ROUNDED}, decoded alone"
    )
    assert reference.guarantee.startswith(f"quantized: the output of the model as it was given, with {ROUNDED}, itself")
    assert pipe.description["approximations"] == [ROUNDED]
    assert pipe.description["exact_to"] == "quantized"


def test_several_approximations_are_all_named():
    lm = TableLM(9)
    lm.approximations = ("one thing", "another")
    guarantee = Pipeline(lm).generate_ids([1], max_new_tokens=2).guarantee
    assert "the verifier's target, with one thing and with another, decoded alone" in guarantee


@pytest.mark.parametrize("quantizer", ["none", "w8a8"])
def test_the_full_model_is_not_promised_where_it_is_approximated(quantizer):
    """One line: what was asked, what there is, what would do; also for a pipeline that is made by hand."""
    refused = r"exact_to='full' promises the model as it was given, and Approximate approximates it \(keys and values"
    with pytest.raises(InvalidRequestError, match=refused):
        Pipeline.from_model(tiny_llama(), quantizer=quantizer, exact_to="full", verifier=Approximate)
    with pytest.raises(InvalidRequestError, match=refused):
        Pipeline(Approximate(tiny_llama()), exact_to="full")


def test_a_verifier_that_only_drafts_may_approximate():
    """The outer target decides what comes out, so the claim is about it alone."""
    model = tiny_llama()
    drafter = NestedDrafter(NgramDrafter(), Approximate(model), k=8)
    pipe = Pipeline(CausalLMVerifier(model), drafter=drafter, exact_to="full", target_name="the model")
    result = pipe.generate_ids([1, 2, 3], **LONG)
    assert result.guarantee.startswith("full: the tokens equal those of the model decoded alone")
    assert result.token_ids == pipe.reference([1, 2, 3], **LONG).token_ids
    assert result.stats["accepted_tokens"] > 5


def test_a_pipeline_made_by_hand_claims_nothing_of_a_model_it_does_not_know():
    guarantee = Pipeline(TableLM(9)).generate_ids([1], max_new_tokens=2).guarantee
    assert guarantee.startswith("target: the tokens equal those of the verifier's target decoded alone")


def test_approximations_are_a_tuple_of_texts():
    for wrong in ("keys in int8", [""], ("",), None):
        lm = TableLM(9)
        lm.approximations = wrong
        with pytest.raises(PluginError, match="declares approximations="):
            default_registry().build("verifier", lm)


def test_the_check_finds_a_verifier_that_approximates_in_silence():
    """Against a plain forward of the model; one that says so passes, and so does what is only rounded."""
    model = tiny("llama")
    check_verifier(Approximate(model), model, examples=2)
    with pytest.raises(ConformanceError, match=r"Silent lists no approximations, and its logits differ .* by 0\.00"):
        check_verifier(Silent(model), model, examples=2)


def test_another_drafter_or_policy_keeps_the_target_and_its_claim():
    """Nothing is quantized or loaded again, and the first pipeline is as it was."""
    pipe = Pipeline.from_model(tiny_llama(), quantizer="w8a8", drafter="none")
    other = pipe.with_drafter("ngram:k=3").with_policy("rejection")
    assert other.verifier is pipe.verifier
    assert (other.description["drafter"], other.description["policy"]) == ("ngram:k=3", "rejection")
    assert (pipe.description["drafter"], pipe.description["policy"]) == ("none", "auto")
    one, two = pipe.generate_ids([1, 2, 1, 2], **LONG), other.generate_ids([1, 2, 1, 2], **LONG)
    assert (one.token_ids, one.guarantee) == (two.token_ids, two.guarantee)
    assert two.stats["drafted_tokens"] > 0 == one.stats["drafted_tokens"]
    assert pipe.with_drafter(lambda token_ids, k: [1] * k).generate_ids([1], **LONG).stats["drafted_tokens"] > 0
    with pytest.raises(InvalidRequestError, match="CascadeDrafter is bound to the model as it was given"):
        pipe.with_drafter("nested")
