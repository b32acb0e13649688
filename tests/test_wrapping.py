"""A verifier around another one loses nothing that the inner one offers."""

from __future__ import annotations

import copy

from quasar import Pipeline
from quasar.protocols import Closable, Describable, Prefillable, Restartable, Strictable
from quasar.registry.registry import default_registry
from quasar.registry.signatures import offers
from quasar.testing import check_verifier
from quasar.testing.fakes import TableLM
from quasar.testing.models import random_prompt, tiny
from quasar.verifiers.causal_lm import CausalLMVerifier
from quasar.verifiers.wrapping import WrappedSession, WrappedVerifier


class CountedSession(WrappedSession):
    """Counts the positions that it verifies."""

    widths: list[int]

    def verify(self, draft):
        self.widths.append(len(draft) + 1)
        return super().verify(draft)


class Counted(WrappedVerifier):
    def __init__(self, inner, widths=None):
        super().__init__(inner)
        self.widths = [] if widths is None else widths

    def around(self, inner):
        return Counted(inner, self.widths)

    def wrap(self, session):
        counted = CountedSession(session)
        counted.widths = self.widths
        return counted


def test_a_wrapper_is_built_in_a_few_lines_and_changes_no_token():
    model, prompt = tiny("llama"), random_prompt(6)
    inner = default_registry().build_verifier("causal_lm", model)
    counted = Counted(inner)
    pipe = Pipeline(counted, drafter=lambda token_ids, k: token_ids[-3:][:k])
    result = pipe.generate_ids(prompt * 2, max_new_tokens=12, eos_token_id=None)
    assert result.token_ids == Pipeline(inner).generate_ids(prompt * 2, max_new_tokens=12, eos_token_id=None).token_ids
    assert len(counted.widths) == result.stats["steps"]
    assert max(counted.widths) > 1


def test_it_offers_what_the_inner_one_offers_and_nothing_else():
    """Sessions too; made strict it still wraps."""
    counted, plain = Counted(CausalLMVerifier(tiny("llama"))), Counted(TableLM(9))
    session = counted.start([1, 2, 3])
    for protocol in (Restartable, Prefillable, Closable):
        assert offers(protocol, session, "it")
        assert not offers(protocol, plain.start([1]), "it")
    assert offers(Strictable, counted, "it")
    assert not offers(Strictable, plain, "it")
    assert offers(Describable, counted, "it")
    assert not offers(Describable, plain, "it")
    assert session.pending == 2
    strict = counted.strict()
    assert (type(strict), strict.invariance, counted.invariance) == (Counted, "bitwise", "argmax")
    assert strict.widths is counted.widths
    assert copy.copy(counted).inner is counted.inner


def test_a_wrapper_passes_the_check_of_verifiers():
    check_verifier(Counted(TableLM(20, levels=50)), examples=3)
