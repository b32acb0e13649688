"""The conformance checks: what comes with Quasar passes them, and each finds the bugs that were planted for it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import Phase, settings
from torch import nn

from quasar.drafters.ngram import NgramDrafter, NgramSession
from quasar.drafters.none import EmptyDrafter
from quasar.errors import PluginError, UnsupportedModelError
from quasar.policies import rejection
from quasar.policies.coupled import CoupledPolicy
from quasar.policies.greedy import GreedyPolicy
from quasar.policies.rejection import RejectionPolicy
from quasar.policies.typical import TypicalPolicy
from quasar.registry import plugins
from quasar.registry.registry import Registry
from quasar.testing import (
    ConformanceError,
    TableLM,
    check_drafter,
    check_policy,
    check_quantizer,
    check_verifier,
    tiny,
)
from quasar.testing.chi_square import check_frequencies, critical_value
from quasar.testing.fakes import TableSession
from quasar.testing.test_conformance import subjects_of
from quasar.types import Draft, Quantized, Verdict, Verification
from quasar.weights.layers import check_finite, linear_layers, replace_module, structure_copy

# --- drafters -------------------------------------------------------------------------------------------------------


class KeepsSequencesOnTheStrategy(EmptyDrafter):
    """One session for all."""

    def start(self, prompt_ids, sampling):
        self.token_ids = list(prompt_ids)
        return self

    def propose(self, max_tokens):
        return Draft(self.token_ids[-max_tokens:] if max_tokens else ())

    def commit(self, token_ids, verification):
        self.token_ids += token_ids


class Own(EmptyDrafter):
    """A drafter whose sessions keep their tokens; the bugs below change one method of it."""

    def start(self, prompt_ids, sampling):
        session = type(self)()
        session.token_ids, session.sampling = list(prompt_ids), sampling
        return session

    def propose(self, max_tokens):
        return Draft(self.token_ids[-3:][:max_tokens])

    def commit(self, token_ids, verification):
        self.token_ids += token_ids

    def restart(self, token_ids):
        self.token_ids = list(token_ids)


class ChangesThePrompt(Own):
    def start(self, prompt_ids, sampling):
        prompt_ids.append(0)
        return super().start(prompt_ids, sampling)


class DrawsFromGlobalNoise(Own):
    def propose(self, max_tokens):
        return Draft(torch.randint(9, (max_tokens,)))


class GuessesGreedilyAndClaimsToDraw(Own):
    """The drafted token is the most probable one, its probability that of a draw."""

    def propose(self, max_tokens):
        probs = torch.full((max_tokens, 40), 0.01, dtype=torch.float64)
        probs[:, 3] = 0.61
        return Draft([3] * max_tokens, probs)


class GivesLogitsAsProbabilities(Own):
    def propose(self, max_tokens):
        return Draft([1] * max_tokens, torch.full((max_tokens, 40), 0.5))


class DraftsWhatItGivesNoProbability(Own):
    def propose(self, max_tokens):
        return Draft([1] * max_tokens, torch.eye(40)[[2] * max_tokens])


class RemembersAcrossRestart(NgramDrafter):
    def start(self, prompt_ids, sampling):
        session = Forgetful(self)
        session.extend(prompt_ids)
        return session


class Forgetful(NgramSession):
    def restart(self, token_ids):
        self.extend(token_ids)


class WritesIntoTheLogits(Own):
    def commit(self, token_ids, verification):
        verification.logits.zero_()
        super().commit(token_ids, verification)


class Drawing(Own):
    """Draws from fixed probabilities; the bugs below spoil a part of it."""

    weights = torch.tensor([0.4, 0.3, 0.2, 0.1] + [0.0] * 36, dtype=torch.float64)

    def propose(self, max_tokens):
        noise = self.sampling.at(len(self.token_ids)).apart()
        tokens = [self.token(noise, row) for row in range(min(3, max_tokens))]
        return Draft(tokens, self.weights.repeat(len(tokens), 1) if tokens else None)

    def token(self, noise, row):
        return noise.draw(self.weights, row)


class DrawsTheFirstTokenOnly(Drawing):
    def token(self, noise, row):
        return noise.draw(self.weights, row) if row == 0 else 0


class DrawsAllRowsWithOneNoise(Drawing):
    def token(self, noise, row):
        return noise.draw(self.weights, 0)


class DrawsAllDraftsWithOneNoise(Drawing):
    def token(self, noise, row):
        return self.sampling.at(0).apart().draw(self.weights, row)


class ChangesTheModelItIsBoundTo(Own):
    def bind(self, model, tokenizer, calibration):
        model.lm_head.weight.data.mul_(1.01)
        return self


class WritesIntoHiddenStates(Own):
    needs = frozenset({"hidden:-1"})

    def commit(self, token_ids, verification):
        verification.features["hidden:-1"].zero_()
        super().commit(token_ids, verification)


class KeepsThePromptForItself(Own):
    """It extends the caller's list later on."""

    def start(self, prompt_ids, sampling):
        session = super().start(prompt_ids, sampling)
        session.token_ids = prompt_ids
        return session


# --- verifiers ------------------------------------------------------------------------------------------------------


class FaultyTable(TableLM):
    """A table whose sessions are of the class :attr:`session`."""

    session: type[TableSession]

    def start(self, prompt_ids, needs=frozenset()):
        return self.session(self, prompt_ids, needs)


def faulty(session_class, **attributes):
    """A target whose sessions have one method wrong."""
    kind = type(session_class.__name__ + "Table", (FaultyTable,), {"session": session_class, **attributes})
    return kind(20, levels=50)


class LooksAhead(TableSession):
    """As a causal mask that is aligned at the top left does."""

    def verify(self, draft):
        verification = super().verify(draft)
        verification.logits[:-1] += 0.01 * sum(draft.token_ids)
        return verification


class KeepsOneTooMany(TableSession):
    def commit(self, token_ids):
        keep = self.committed_length + len(token_ids)
        del self.cached[keep:]
        self.committed_length += len(token_ids)
        self.kept, self.last = len(self.cached), token_ids[-1]


class LosesTheLastAccepted(TableSession):
    """The cache lacks the last draft token when all were accepted."""

    def commit(self, token_ids):
        whole = len(self.cached) == self.committed_length - 1 + len(token_ids) and len(token_ids) > 1
        super().commit(token_ids)
        if whole:
            self.cached[-1] = 0


class ScalesByTheCall(TableSession):
    """As one scale of the activations for all rows of a call does."""

    def verify(self, draft):
        verification = super().verify(draft)
        return Verification(verification.logits * (1 + 0.01 * len(draft)), verification.features)


class ReusesItsBuffer(TableSession):
    def verify(self, draft):
        verification = super().verify(draft)
        buffer = self._lm.__dict__.setdefault("buffer", torch.zeros(64, 20, dtype=torch.float64))
        buffer[: len(draft) + 1] = verification.logits
        return Verification(buffer[: len(draft) + 1], verification.features)


class KeepsWhatWasAbandoned(TableSession):
    """A draft that was scored and never judged stays cached."""

    def verify(self, draft):
        self.kept = len(self.cached)
        return super().verify(draft)


class RollsHiddenStates(TableSession):
    """Each row has the hidden states of the position after it."""

    def verify(self, draft):
        verification = super().verify(draft)
        features = {name: rows.roll(-1, 0) for name, rows in verification.features.items()}
        return Verification(verification.logits, features)


class ForgetsAfterFortyTokens(TableSession):
    def verify(self, draft):
        verification = super().verify(draft)
        return Verification(verification.logits.roll(int(len(self.cached) > 40), 1), verification.features)


class SharesItsSequence(FaultyTable):
    """All sessions are one."""

    def start(self, prompt_ids, needs=frozenset()):
        if not hasattr(self, "only"):
            self.only = TableSession(self, prompt_ids)
        self.only.__init__(self, prompt_ids, needs)
        return self.only


class IgnoresHiddenStates(FaultyTable):
    def start(self, prompt_ids, needs=frozenset()):
        return TableSession(self, prompt_ids)


# --- policies -------------------------------------------------------------------------------------------------------


class AcceptsOneTooMany(CoupledPolicy):
    def decide(self, draft, verification, sampling):
        verdict = super().decide(draft, verification, sampling)
        n = min(verdict.n_accepted + 1, len(draft))
        return Verdict(n, sampling.choose(verification.logits[n], n))


class BonusFromTheRowBefore(CoupledPolicy):
    def decide(self, draft, verification, sampling):
        n = super().decide(draft, verification, sampling).n_accepted
        return Verdict(n, sampling.choose(verification.logits[max(0, n - 1)], n))


class NoiseOfTheFirstPosition(CoupledPolicy):
    """Every row with the same noise."""

    def decide(self, draft, verification, sampling):
        for row, logits in enumerate(verification.logits):
            token_id = sampling.choose(logits, 0)
            if row == len(draft) or draft.token_ids[row] != token_id:
                return Verdict(row, token_id)
        raise AssertionError


class TiesToTheHighestId(GreedyPolicy):
    def decide(self, draft, verification, sampling):
        return super().decide(
            draft, Verification(verification.logits + 1e-6 * torch.arange(verification.logits.shape[-1])), sampling
        )


class ResidualFromTheTarget(RejectionPolicy):
    """A rejected token is replaced by one of the target's, not of what the draft left of it."""

    def decide(self, draft, verification, sampling):
        verdict = super().decide(draft, verification, sampling)
        n = verdict.n_accepted
        return Verdict(n, sampling.draw(sampling.probabilities(verification.logits[n]), n, anew=True))


class JudgesAtAnotherTemperature(RejectionPolicy):
    """The target's probabilities are not those of plain sampling."""

    def decide(self, draft, verification, sampling):
        sharper = Verification(verification.logits * 3)
        return super().decide(draft, sharper, sampling)


class ForgetsTheCuts(RejectionPolicy):
    """top-k, top-p and min-p do not reach the target's probabilities."""

    def decide(self, draft, verification, sampling):
        return super().decide(draft, verification, attrs.evolve(sampling, top_k=None, top_p=None, min_p=None))


class KeepsLongDraftsUnseen(CoupledPolicy):
    def decide(self, draft, verification, sampling):
        verdict = super().decide(draft, verification, sampling)
        n = verdict.n_accepted
        return verdict if n < 8 else Verdict(len(draft), sampling.choose(verification.logits[-1], len(draft)))


class ReusesTheDraftersNoise(RejectionPolicy):
    """Accepts or rejects by a number that is the same at every position."""

    def decide(self, draft, verification, sampling):
        for row, token_id in enumerate(draft.token_ids):
            target_probs = sampling.probabilities(verification.logits[row]).numpy()
            draft_probs = rejection.draft_distributions(draft)(row, len(target_probs))
            chance = rejection.acceptance_probability(target_probs, draft_probs, token_id)
            if sampling.at(0).uniform(0) >= chance:
                return Verdict(row, sampling.drawn(rejection.residual(target_probs, draft_probs), row, anew=True))
        k = len(draft)
        return Verdict(k, sampling.draw(sampling.probabilities(verification.logits[k]), k, anew=True))


class LossyInSecret(RejectionPolicy):
    def decide(self, draft, verification, sampling):
        return (super() if sampling.is_greedy else TypicalPolicy()).decide(draft, verification, sampling)


class MasksInPlace(CoupledPolicy):
    def decide(self, draft, verification, sampling):
        verdict = super().decide(draft, verification, sampling)
        verification.logits[0, 0] = -1.0
        return verdict


class DrawsFromTheGlobalGenerator(CoupledPolicy):
    def decide(self, draft, verification, sampling):
        torch.rand(1)
        return super().decide(draft, verification, sampling)


class BeyondTheDraft(CoupledPolicy):
    def decide(self, draft, verification, sampling):
        return Verdict(len(draft) + 1, 0)


# --- quantizers -----------------------------------------------------------------------------------------------------


class Faulty:
    """Rounds weights to 8 bits; the bugs below change one thing."""

    def quantize(self, model, calibration=None):
        return Quantized(self.make(model, calibration), self.describe())

    def describe(self):
        return {"quantizer": "faulty"}

    def layer(self, layer):
        return Rounded(layer.weight, layer.bias)

    def chosen(self, model):
        return [layer for layer in linear_layers(model) if "head" not in layer.name]

    def make(self, model, calibration=None):
        if any(isinstance(module, Rounded) for module in model.modules()):
            raise UnsupportedModelError("quantized already")
        for layer in self.chosen(model):
            check_finite(layer)
        quantized = structure_copy(model)
        for layer in self.chosen(model):
            replace_module(quantized, layer.name, self.layer(layer))
        return quantized


class Rounded(nn.Module):
    def __init__(self, weight, bias) -> None:
        super().__init__()
        scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-9) / 127
        self.register_buffer("rounded", (weight / scale).round() * scale)
        self.bias = bias

    def forward(self, inputs):
        return nn.functional.linear(inputs, self.rounded, self.bias)


class OneScaleForTheCall(Rounded):
    def forward(self, inputs):
        scale = inputs.abs().max() / 127
        return super().forward((inputs / scale).round() * scale)


class ScalesPerCall(Faulty):
    def layer(self, layer):
        return OneScaleForTheCall(layer.weight, layer.bias)


class OneScaleForAllPositions(Rounded):
    """A row's own in two dimensions; all positions' in three."""

    def forward(self, inputs):
        scale = inputs.abs().amax(dim=1, keepdim=True) / 127
        return super().forward((inputs / scale.clamp_min(1e-9)).round() * scale)


class ScalesOverPositions(Faulty):
    def layer(self, layer):
        return OneScaleForAllPositions(layer.weight, layer.bias)


class OtherArithmeticForManyRows(Rounded):
    def forward(self, inputs):
        return super().forward(inputs if inputs.shape[-2] < 17 else (inputs * 64).round() / 64)


class ChangesAt17Rows(Faulty):
    def layer(self, layer):
        return OtherArithmeticForManyRows(layer.weight, layer.bias)


class DrawsInTheDefaultDtype(Faulty):
    def layer(self, layer):
        offset = torch.tensor([0.1], device="cpu")  # in float64 it is another number
        return Rounded((layer.weight.double() + (offset.double() - 0.1) * 1e6).float(), layer.bias)


class LeavesAHook(Faulty):
    def make(self, model, calibration=None):
        model.lm_head.register_forward_hook(lambda *_: None)
        return super().make(model)


class AcceptsInfinity(Faulty):
    def make(self, model, calibration=None):
        if any(layer.weight.isnan().any() for layer in self.chosen(model)):
            return super().make(model)
        if any(isinstance(module, Rounded) for module in model.modules()):
            return model
        quantized = structure_copy(model)
        for layer in self.chosen(model):
            replace_module(quantized, layer.name, self.layer(layer))
        return quantized


class DropsBiases(Faulty):
    def layer(self, layer):
        return Rounded(layer.weight, None)


class RoundsTheUsersModel(Faulty):
    def make(self, model, calibration=None):
        for layer in self.chosen(model):
            layer.weight.data.mul_(64).round_().div_(64)
        return super().make(model)


class TransposesConv1D(Faulty):
    """Takes the stored matrix as it is, though GPT-2 stores it transposed."""

    def layer(self, layer):
        stored = layer.module.weight
        same = stored.shape[0] == stored.shape[1]
        return Rounded(stored if same else layer.weight, layer.bias)


class RoundsTooMuch(Faulty):
    def layer(self, layer):
        return Rounded(layer.weight * 0.3, layer.bias)


class RemembersTheModel(Faulty):
    layers = 0

    def make(self, model, calibration=None):
        made = super().make(model)
        self.layers = len(self.chosen(model))
        return made

    def describe(self):
        return {"quantizer": "faulty", "layers": self.layers}


class AcceptsNaN(Faulty):
    def make(self, model, calibration=None):
        if any(isinstance(module, Rounded) for module in model.modules()):
            return model
        quantized = structure_copy(model)
        for layer in self.chosen(model):
            replace_module(quantized, layer.name, self.layer(layer))
        return quantized


class Shrunk(nn.Linear):
    """A linear layer with smaller weights."""


class QuantizesTwice(Faulty):
    """Its own layers are linear layers like any other."""

    def layer(self, layer):
        made = Shrunk(layer.weight.shape[1], layer.weight.shape[0], device="meta", bias=layer.bias is not None)
        made.weight = nn.Parameter((layer.weight * 0.98).detach())
        made.bias = layer.bias
        return made


class RoundsTheEmbedding(Faulty):
    def make(self, model, calibration=None):
        quantized = super().make(model)
        embedding = quantized.get_input_embeddings()
        embedding.weight = nn.Parameter((embedding.weight * 64).round() / 64)
        return quantized


class ForgetsItsDtype(Faulty):
    def layer(self, layer):
        made = super().layer(layer)
        made.forward = lambda inputs: nn.functional.linear(
            inputs.float(), made.rounded.float(), None if made.bias is None else made.bias.float()
        )
        return made


class DescribesWithTensors(Faulty):
    def describe(self):
        return {"scale": torch.ones(2)}


class DrawsAtRandom(Faulty):
    """Stochastic rounding with the process's own noise."""

    def layer(self, layer):
        return Rounded(layer.weight + 1e-3 * torch.rand(()), layer.bias)


DRAFTERS = {
    "keeps sequences on the strategy": (KeepsSequencesOnTheStrategy, "when another one is used in between"),
    "changes the prompt": (ChangesThePrompt, "changed the prompt"),
    "draws from the global random state": (DrawsFromGlobalNoise, "global random state"),
    "guesses greedily and claims to draw": (GuessesGreedilyAndClaimsToDraw, "not drawn from its probs"),
    "gives logits as probabilities": (GivesLogitsAsProbabilities, "sum to"),
    "drafts what it gives no probability": (DraftsWhatItGivesNoProbability, "its own tokens .* have probabilities"),
    "remembers what was before a restart": (RemembersAcrossRestart, r"restart\("),
    "writes into the logits it is shown": (WritesIntoTheLogits, "changed the logits"),
    "draws the first token of a draft only": (DrawsTheFirstTokenOnly, "are not drawn from its probs"),
    "draws all rows with one noise": (DrawsAllRowsWithOneNoise, "are not drawn from its probs"),
    "draws all drafts with one noise": (DrawsAllDraftsWithOneNoise, "are not drawn from its probs"),
    "changes the model that it is bound to": (ChangesTheModelItIsBoundTo, "bind changed the model"),
    "writes into the features that it is shown": (WritesIntoHiddenStates, "changed the logits or features"),
    "keeps the caller's list and extends it": (KeepsThePromptForItself, "changed the prompt"),
}
VERIFIERS = {
    "a later token changes earlier rows": (faulty(LooksAhead), "declares invariance 'bitwise', but at position"),
    "an off-by-one rollback": (faulty(KeepsOneTooMany), "has cached . positions of"),
    "a fully accepted draft is not cached whole": (faulty(LosesTheLastAccepted), "its logits differ"),
    "one scale for all rows of a call": (faulty(ScalesByTheCall, invariance="argmax"), "declares invariance 'argmax'"),
    "a buffer that the next call overwrites": (faulty(ReusesItsBuffer), "have changed since"),
    "an abandoned draft stays cached": (faulty(KeepsWhatWasAbandoned), "its logits differ"),
    "one sequence for all sessions": (SharesItsSequence(20), "has cached|its logits differ"),
    "no features": (IgnoresHiddenStates(20), r"returned None; expected \[k\+1, D\]"),
    "features of the next position": (faulty(RollsHiddenStates), "row 0 of the features"),
    "a long history is forgotten": (faulty(ForgetsAfterFortyTokens), "its logits differ"),
}
OUTPUTS_DIFFER = "outputs with .* drafts are not the target's"
POLICIES = {
    "accepts one token too many": (AcceptsOneTooMany, "emits"),
    "takes the bonus token from the row before": (BonusFromTheRowBefore, "emits"),
    "uses the noise of the first position everywhere": (NoiseOfTheFirstPosition, "own choice with the same noise"),
    "breaks ties towards the highest id": (TiesToTheHighestId, "the target's argmax"),
    "replaces a rejected token by one of the target, not of the residual": (
        ResidualFromTheTarget,
        "outputs with .* drafts are not the target's",
    ),
    "judges at another temperature than plain sampling": (
        JudgesAtAnotherTemperature,
        "outputs with .* drafts are not the target's",
    ),
    "judges every position with the same number": (
        ReusesTheDraftersNoise,
        "outputs with .* drafts are not the target's",
    ),
    "is lossy and does not say so": (LossyInSecret, OUTPUTS_DIFFER),
    "masks the logits in place": (MasksInPlace, "changed the logits"),
    "advances the global random state": (DrawsFromTheGlobalGenerator, "global random state"),
    "keeps more than was drafted": (BeyondTheDraft, "returned Verdict"),
    "forgets top-k, top-p and min-p": (ForgetsTheCuts, OUTPUTS_DIFFER),
    "keeps the end of long drafts unseen": (KeepsLongDraftsUnseen, "emits"),
}
QUANTIZERS = {
    "one activation scale for all rows of a call": (ScalesPerCall, "scales of activations must be those of a row"),
    "other arithmetic for 17 rows and more": (ChangesAt17Rows, "of 17 rows, one differs by"),
    "makes a tensor in the default dtype": (DrawsInTheDefaultDtype, "made under another default dtype of torch"),
    "drops biases": (DropsBiases, "for an input of zeros"),
    "rounds the user's own model": (RoundsTheUsersModel, "changed .* of the model that it was given"),
    "transposes the weight of a Conv1D": (TransposesConv1D, "logits differ"),
    "rounds too much": (RoundsTooMuch, "logits differ|layer .* differs"),
    "accepts a weight that is NaN": (AcceptsNaN, "holds nan and is quantized"),
    "quantizes twice": (QuantizesTwice, "quantized already is quantized once more"),
    "rounds the embedding": (RoundsTheEmbedding, "changed the input embedding"),
    "forgets its dtype": (ForgetsItsDtype, "gives torch.float32 for torch.bfloat16"),
    "remembers the model in its description": (RemembersTheModel, "describe\\(\\) says something else after"),
    "describes with tensors": (DescribesWithTensors, "not JSON-serialisable"),
    "rounds at random with the global state": (DrawsAtRandom, "global random state"),
    "one activation scale for all positions": (ScalesOverPositions, "give different outputs"),
    "leaves a hook on the user's model": (LeavesAHook, "changed the hooks"),
    "accepts a weight that is infinite": (AcceptsInfinity, "holds inf and is quantized"),
}


CASES = [
    pytest.param(check, *case, id=f"{check.__name__}-{bug}")
    for check, bugs in (
        (check_drafter, DRAFTERS),
        (check_verifier, VERIFIERS),
        (check_policy, POLICIES),
        (check_quantizer, QUANTIZERS),
    )
    for bug, case in bugs.items()
]


@pytest.fixture
def as_found():
    """Failures are reported as they were found: to make them smaller takes longer than to find them."""
    profile = settings.get_current_profile_name()
    settings.register_profile("as found", settings.get_profile(profile), phases=[Phase.generate])
    settings.load_profile("as found")
    yield
    settings.load_profile(profile)


@pytest.mark.usefixtures("as_found")
@pytest.mark.parametrize(("check", "faulty_one", "message"), CASES)
def test_a_check_finds_the_planted_bug(check, faulty_one, message):
    """Each by the rule that it breaks."""
    with pytest.raises(ConformanceError, match=message):
        check(faulty_one() if isinstance(faulty_one, type) else faulty_one)


def test_without_its_bug_each_example_passes():
    """What the faulty ones are made of keeps the rules, so it is the bug that is found."""
    check_drafter(Own())
    check_verifier(faulty(TableSession))
    check_quantizer(Faulty())


@pytest.mark.parametrize("drafter", [lambda token_ids, k: token_ids[-k:], "ngram:k=2,max_n=2", NgramDrafter(k=7)])
def test_a_drafter_is_given_as_function_spec_or_object(drafter):
    """As to a Pipeline."""
    check_drafter(drafter)


def test_a_signature_that_does_not_fit_is_named_before_anything_is_tried():
    """As at load."""

    class NoLimit(EmptyDrafter):
        def start(self, prompt_ids):
            return self

    with pytest.raises(PluginError, match=r"NoLimit.start.* cannot be called as Drafter.start"):
        check_drafter(NoLimit())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", ["gemma3", "gpt2", "falcon_alibi"])
def test_verifiers_over_other_models_pass_too(family, dtype):
    """Sliding windows, learnt positions, attention that cannot be replaced."""
    check_verifier("causal_lm", tiny(family, dtype=dtype), examples=8)


def test_properties_ask_for_examples_so_that_a_profile_can_multiply_them():
    """With ``examples(n)``; a number of one's own is the same in every profile."""
    root = Path(__file__).resolve().parent.parent
    paths = [*root.glob("tests/*.py"), *root.glob("plugins/*/tests/*.py")]
    files = {path.name: path.read_text(encoding="utf-8") for path in paths}
    assert {"test_testing.py", "test_awq_quantizer.py"} <= files.keys()
    assert [name for name, source in files.items() if re.search(r"max_examples\s*=", source)] == []


def test_frequencies_are_judged_rarely_wrong_and_never_generously():
    """The critical values are those of tables; what cannot occur is named; a loaded die is found, a fair one is not."""
    assert 25 < critical_value(1) < 32
    assert 50 < critical_value(10) < 60
    fair = dict.fromkeys(range(6), 1 / 6)
    check_frequencies({0: 95, 1: 105, 2: 100, 3: 110, 4: 92, 5: 98}, fair, "die")
    with pytest.raises(ConformanceError, match=r"die: frequencies .* \(chi-square"):
        check_frequencies({0: 200, 1: 80, 2: 80, 3: 80, 4: 80, 5: 80}, fair, "die")
    with pytest.raises(ConformanceError, match="7 occurred 1 times of 2 and has probability 0"):
        check_frequencies({0: 1, 7: 1}, fair, "die")
    check_frequencies({0: 3}, {0: 1.0}, "certain")


def run_pytest(*arguments, cwd):
    """pytest in a process of its own, with the plug-in and no other test."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600)


def test_hook_pytest_checks_all_that_a_distribution_registers(tmp_path):
    """Every built-in strategy that has a check passes it, by one option and no test of one's own.

    ``nested`` holds a pipeline and takes as long as all others together; it has tests of its own.
    """
    entries = [entry for entry in Registry(plugins.load_plugins()[:1]).entries() if entry.kind != "command"]
    run = run_pytest("--quasar-check", "quasar-decode", "-vv", "-k", "not nested", cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    for entry in entries:
        tried = f"test_conforms[{entry.kind}={entry.name}] PASSED" in run.stdout
        assert tried == (entry.kind not in ("kernel", "checkpoint") and entry.name not in ("model", "gguf", "nested"))
    assert "drafter model needs options: --quasar-check drafter=model:name=" in run.stdout
    assert "quantizer gguf needs models of yours" in " ".join(run.stdout.split())


def test_hook_pytest_checks_one_spec_and_fails_where_it_is_broken(tmp_path):
    """KIND=SPEC; a strategy that breaks a rule is a failed test that says which."""
    (tmp_path / "acme.py").write_text(
        "from quasar import hookimpl\n"
        "from quasar.policies.coupled import CoupledPolicy\n"
        "from quasar.types import Verdict\n\n\n"
        "class Wild(CoupledPolicy):\n"
        "    def decide(self, draft, verification, sampling):\n"
        "        return Verdict(0, 0)\n\n\n"
        "@hookimpl\n"
        "def quasar_policies():\n"
        "    return {'wild': Wild}\n"
    )
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quasar]\nacme = acme\n")
    conftest = "import os\nos.environ['QUASAR_PLUGINS'] = 'acme'\n"
    (tmp_path / "conftest.py").write_text(conftest)
    run = run_pytest("--quasar-check", "acme", "--quasar-check", "drafter=ngram:k=1", cwd=tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "Wild emits" in run.stdout
    assert "1 failed, 1 passed" in run.stdout


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("quasar-nowhere", "no distribution of that name registers a strategy"),
        ("kernel=torch", "there is no check of a kernel"),
    ],
)
def test_hook_pytest_refuses_what_it_cannot_check(what, message):
    """Usage errors, with what would do."""
    with pytest.raises(pytest.UsageError, match=message):
        list(subjects_of(what))


def test_hook_pytest_ends_with_the_status_of_a_usage_error(tmp_path):
    """Not with that of a failed test, or of none."""
    run = run_pytest("--quasar-check", "kernel=torch", cwd=tmp_path)
    assert run.returncode not in (0, 1, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert "--quasar-check kernel=torch: there is no check of a kernel" in run.stdout + run.stderr


def test_correct_and_unusual_strategies_are_not_refused():
    """Probabilities in 16 bits, a short context, a quantizer of one family only, a vocabulary of one token."""

    class InHalf(Drawing):
        def propose(self, max_tokens):
            draft = super().propose(max_tokens)
            return draft if draft.probs is None else Draft(draft.token_ids, draft.probs.bfloat16())

    class LlamaOnly(Faulty):
        def make(self, model, calibration=None):
            if model.config.model_type != "llama":
                raise UnsupportedModelError("only Llama")
            return super().make(model)

    check_drafter(Drawing())
    check_drafter(InHalf())
    check_drafter("ngram", target=TableLM(12, max_length=6))
    check_quantizer(LlamaOnly())
    check_verifier(TableLM(1), examples=3)
    check_verifier(TableLM(9, max_length=7), examples=5)
    with pytest.raises(UnsupportedModelError, match="only Llama"):
        check_quantizer(LlamaOnly(), {"gpt2": tiny("gpt2")})


class Remembers(Own):
    """Proposes what some earlier sequence said after the same token."""

    remembers = True

    def __init__(self, memory=None):
        self.memory = {} if memory is None else memory

    def start(self, prompt_ids, sampling):
        session = type(self)(self.memory)
        session.token_ids = list(prompt_ids)
        return session

    def propose(self, max_tokens):
        return Draft(self.memory.get(self.token_ids[-1], [])[:max_tokens])

    def commit(self, token_ids, verification):
        self.memory[self.token_ids[-1]] = list(token_ids)
        super().commit(token_ids, verification)


class RemembersInSilence(Remembers):
    remembers = False


class RemembersAndWritesIntoTheLogits(Remembers):
    def commit(self, token_ids, verification):
        verification.logits.zero_()
        super().commit(token_ids, verification)


def test_a_drafter_may_remember_earlier_sequences_if_it_says_so():
    """Its output is checked as ever, and so is what it leaves alone; only that it proposes the same again is not."""
    check_drafter(Remembers())
    with pytest.raises(ConformanceError, match=r"remember|propose"):
        check_drafter(RemembersInSilence())
    with pytest.raises(ConformanceError, match="changed the logits"):
        check_drafter(RemembersAndWritesIntoTheLogits())
