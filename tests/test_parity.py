"""Width-invariance and agreement are measured through the Verifier protocol; strict mode makes the first bitwise."""

from __future__ import annotations

import json

import pytest
import torch

from quasar.commands.parity import AgreementReport, as_json, greedy_text, measure_agreement
from quasar.errors import InvalidRequestError, UnsupportedModelError
from quasar.pipeline.pipeline import Pipeline
from quasar.pipeline.plan import strictly
from quasar.testing.fakes import TableLM
from quasar.testing.models import tiny
from quasar.types import Verification
from quasar.verifiers import fixed_width
from quasar.verifiers.causal_lm import CausalLMVerifier
from quasar.verifiers.invariance import NEAR_TIE, logits_at_width, measure_invariance
from toys import tiny_llama


class WidthDependent(TableLM):
    """Adds ``size`` times the width to the logits of every second token: what a careless kernel does."""

    def __init__(self, *arguments, size: float, **options) -> None:
        super().__init__(*arguments, **options)
        self._size = size

    def start(self, prompt_ids, needs=frozenset()):
        session = super().start(prompt_ids, needs)
        verify = session.verify

        def noisy(draft):
            logits = verify(draft).logits
            logits[:, ::2] += self._size * len(draft)
            return Verification(logits)

        session.verify = noisy
        return session


@pytest.mark.parametrize(
    ("size", "declared", "measured", "holds"),
    [
        (0.0, "bitwise", "bitwise", True),
        (1e-7, "bitwise", "argmax", False),
        (1e-7, "argmax", "argmax", True),
        (100.0, "argmax", "none", False),
        (100.0, "none", "none", True),
    ],
)
def test_the_measure_finds_what_a_width_does_to_the_logits(size, declared, measured, holds):
    """Bit-identical, different in rounding, or different in what is chosen; and whether the declaration holds."""
    verifier = WidthDependent(40, seed=3, size=size)
    verifier.invariance = declared
    token_ids = [1, 2, *TableLM(40, seed=3).greedy((1, 2), 40)]
    report = measure_invariance(verifier, token_ids, begin=2)
    assert (report.declared, report.measured, report.holds) == (declared, measured, holds)
    assert list(report.widths) == list(range(1, 17))
    assert report.widths[1].max_abs_diff == 0
    assert report.widths[16].max_abs_diff == pytest.approx(15 * size)
    assert any(fork.gap > NEAR_TIE for fork in report.forks) == (measured == "none")
    assert all(2 <= fork.position < 42 for fork in report.forks)


def test_rows_are_those_of_plain_decoding_at_every_width():
    """Row i predicts token ``begin + i``; what does not fill a window is left out, and too few tokens are refused."""
    target = TableLM(9, seed=1)
    token_ids = [1, 2, *target.greedy((1, 2), 20)]
    alone = torch.stack([target.row(token_ids[:n]) for n in range(2, 22)])
    for width in range(1, 17):
        rows = logits_at_width(target, token_ids, 2, width)
        assert len(rows) == 20 - 20 % width
        assert torch.equal(rows, alone[: len(rows)])
    with pytest.raises(InvalidRequestError, match="3 tokens are too few for a width of 4"):
        logits_at_width(target, token_ids[:5], 2, 4)


class Sharper(TableLM):
    """Another distribution with the same argmax everywhere but after token 0."""

    def row(self, context):
        row = super().row(context) / 500
        return row.flip(0) if context[-1] == 0 else row


def test_agreement_counts_equal_choices_and_adds_up_the_divergence():
    """Against values computed row by row."""
    full, other = TableLM(5, seed=2, levels=4), Sharper(5, seed=2, levels=4)
    text = greedy_text(full, (1, 2), 30)
    assert text == [1, 2, *full.greedy((1, 2), 30)]
    report = measure_agreement(full, other, [(2, text)])
    pairs = [(full.row(text[:n]), other.row(text[:n])) for n in range(2, 32)]
    same = [bool(one.argmax() == two.argmax()) for one, two in pairs]
    divergences = [
        float(torch.nn.functional.kl_div(two.log_softmax(0), one.log_softmax(0), log_target=True, reduction="sum"))
        for one, two in pairs
    ]
    assert report.top1 == sum(same) / 30
    assert report.kl == pytest.approx(sum(divergences) / 30, abs=1e-12)
    assert (report.tokens, sum(report.runs)) == (30, sum(same))
    assert measure_agreement(full, full, [(2, text)]) == AgreementReport(1.0, 0.0, 30, [30])


def test_the_json_has_the_fixed_keys():
    """``invariance`` {declared, measured}, ``widths`` {width: {…}}, ``agreement`` {top1, kl, tokens}."""
    target = TableLM(9, seed=1)
    text = greedy_text(target, (1, 2), 20)
    reports = measure_invariance(target, text, 2), measure_agreement(target, target, [(2, text)])
    found = json.loads(json.dumps(as_json(*reports)))
    assert {"declared", "measured"} <= found["invariance"].keys()
    assert found["widths"]["16"].keys() == {"max_abs_diff", "argmax_mismatches"}
    assert {"top1", "kl", "tokens"} <= found["agreement"].keys()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral_window", "gemma3", "gpt2"])
@pytest.mark.parametrize("quantizer", ["none", "w8a8"])
def test_a_strict_verifier_is_bitwise_at_every_width(family, quantizer):
    """Attention, norms, activations, output head: all of it, at widths 1 to 16, and the claim then says so."""
    pipe = Pipeline.from_model(tiny(family), quantizer=quantizer, strict=True)
    assert pipe.verifier.invariance == "bitwise"
    token_ids = torch.randint(64, (60,), generator=torch.Generator().manual_seed(5)).tolist()
    assert measure_invariance(pipe.verifier, token_ids, begin=9).measured == "bitwise"
    result = pipe.generate_ids([5, 6, 7, 5, 6, 7], max_new_tokens=20)
    assert "without exception" in result.guarantee
    assert result.token_ids == pipe.reference([5, 6, 7, 5, 6, 7], max_new_tokens=20).token_ids


def test_a_model_that_cannot_be_strict_is_refused_with_the_width_and_the_difference(monkeypatch):
    """The self-test at construction can fail: here panels are left out, and one row gets what belongs to another."""
    monkeypatch.setattr(fixed_width.FixedPanels, "forward", lambda self, x: self._layer.module(x) + 1e-6 * x.shape[-2])
    with pytest.raises(UnsupportedModelError, match=r"cannot be decoded strictly: at 2 positions .* differ .* by"):
        CausalLMVerifier(tiny_llama()).strict()


def test_a_verifier_is_taken_strictly_only_if_it_is_bitwise_or_can_be_made_so():
    """One that declares it is taken as it is; one without a method ``strict`` is refused by name."""
    target = TableLM(9)
    assert strictly(target) is target
    target.invariance = "argmax"
    with pytest.raises(UnsupportedModelError, match="TableLM declares invariance 'argmax' and has no method strict"):
        strictly(target)
