"""A state machine over verify sessions: started, verified, committed, abandoned, restarted, in any order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from quasar.drafters.nested import NestedDrafter
from quasar.drafters.ngram import NgramDrafter
from quasar.drafters.none import EmptyDrafter
from quasar.quantizers.w8a8.quantizer import W8A8Quantizer
from quasar.testing import TableLM, session_machine
from quasar.testing.models import random_prompt, tiny
from quasar.testing.running import run_settings
from quasar.verifiers.causal_lm import CausalLMVerifier

TARGETS = {
    "table": lambda: TableLM(30, levels=60),
    "llama": lambda: CausalLMVerifier(tiny("llama")),
    "llama, strict": lambda: CausalLMVerifier(tiny("llama"), strict=True),
    "llama, w8a8": lambda: CausalLMVerifier(quantized("llama")),
    "sliding windows": lambda: CausalLMVerifier(tiny("mistral_window")),
    "sliding windows, w8a8": lambda: CausalLMVerifier(quantized("gemma3")),
    "bfloat16": lambda: CausalLMVerifier(tiny("qwen2", dtype=torch.bfloat16)),
    "learnt positions": lambda: CausalLMVerifier(tiny("gpt2")),
}


DRAFTERS = {
    "llama": lambda target: NgramDrafter(k=4),
    "llama, w8a8": lambda target: NestedDrafter(NgramDrafter(), CausalLMVerifier(tiny("llama", seed=5)), k=6, min_k=1),
    "sliding windows": lambda target: NestedDrafter(EmptyDrafter(), target, k=3, min_k=3, max_k=3),
}


def quantized(family):
    return W8A8Quantizer().quantize(tiny(family), [torch.tensor([random_prompt(40, seed=9)])]).model


@pytest.mark.parametrize("target", TARGETS)
def test_a_session_says_what_plain_decoding_says_after_any_history(target):
    """Every row, the cached length and what was returned before, after every step; all kinds of steps occur."""
    verifier = TARGETS[target]()
    drafter = DRAFTERS[target](verifier) if target in DRAFTERS else None
    machine = session_machine(verifier, drafter)
    run_state_machine_as_test(machine, settings=settings(run_settings(20), stateful_step_count=20))
    events = ["verified", "committed", "kept several", "rolled back", "abandoned", "interleaved"]
    events += ["restarted"] if target != "table" else []
    events += ["proposed"] if drafter is not None else []
    assert min(machine.seen[event] for event in events) >= 3, machine.seen
