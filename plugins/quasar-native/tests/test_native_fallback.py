"""What the engine is not known to compute is left to transformers, with the reason."""

from __future__ import annotations

import os
import subprocess
import sys

import attrs
import pytest
import torch
from native_models import plain_logits, random_tokens
from torch import nn

from quasar.errors import UnsupportedModelError
from quasar.quantizers.w8a8.quantizer import W8A8Quantizer
from quasar.testing.models import FAMILIES, tiny
from quasar.types import Draft
from quasar.verifiers.causal_lm import CausalLMVerifier
from quasar_native import _native, families
from quasar_native.architecture import Architecture
from quasar_native.verifier import NativeVerifier

TOKENS = random_tokens(30)
OTHERS = ("gpt2", "mixtral", "gpt_neox", "phi3", "opt", "bloom", "gpt_neo", "falcon_alibi")


def reason_of(model) -> str:
    """Why the verifier fell back; what it then says is what ``causal_lm`` says."""
    verifier = NativeVerifier(model, threads=1)
    description = verifier.describe()
    assert description["engine"] == "transformers"
    plain = CausalLMVerifier(model)
    assert verifier.invariance == plain.invariance
    assert (verifier.vocab_size, verifier.max_length) == (plain.vocab_size, plain.max_length)
    draft = Draft(TOKENS[9:12])
    assert torch.equal(verifier.start(TOKENS[:9]).verify(draft).logits, plain.start(TOKENS[:9]).verify(draft).logits)
    return description["reason"]


@pytest.mark.parametrize("family", OTHERS)
def test_other_architectures_are_run_by_transformers(family):
    """Whatever they promise is what causal_lm promises for them."""
    model = tiny(family)
    assert f"the model type is {model.config.model_type!r}; the engine runs llama, mistral" in reason_of(model)


def test_no_family_of_the_tests_is_forgotten():
    """Those that the engine runs and those that it leaves alone are all there are."""
    run = {"llama", "mistral_window", "qwen2", "qwen3", "gemma2", "gemma3"}
    assert run | set(OTHERS) == set(FAMILIES)


def test_a_fallback_can_be_made_strict():
    """As causal_lm can."""
    strict = NativeVerifier(tiny("gpt2")).strict()
    assert strict.invariance == "bitwise"
    native = NativeVerifier(tiny("llama"), threads=1)
    assert native.strict() is native


class Doubled(nn.Linear):
    """No linear layer, though it is called one."""

    def forward(self, inputs):
        return 2 * super().forward(inputs)


def doubled(model):
    layer = model.model.layers[1].mlp.down_proj
    layer.__class__ = Doubled


def with_a_module(model):
    model.model.layers[0].mlp.extra = nn.Identity()


def with_a_hook(model):
    model.model.layers[1].register_forward_hook(lambda module, inputs, output: output * 2)


def with_a_forward(model):
    attention = model.model.layers[0].self_attn
    plain = attention.forward
    attention.forward = lambda *args, **kwargs: plain(*args, **kwargs)


def with_another_norm(model):
    model.model.norm = nn.LayerNorm(64)


def with_an_epsilon(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.1


def in_float64(model):
    model.double()


CHANGES = {
    doubled: r"layers\.1\.down_proj is a Doubled, not a linear layer",
    with_a_module: r"layers\.0\.mlp has other modules than LlamaMLP is known to have: extra",
    with_a_hook: r"model\.layers\.1 has hooks",
    with_a_forward: r"the forward of model\.layers\.0\.self_attn was replaced",
    with_another_norm: r"norm is a torch\.nn\.\S*LayerNorm, expected \S*LlamaRMSNorm",
    with_an_epsilon: r"a norm's epsilon is 0\.1",
    in_float64: r"layers\.0\.q_proj is in torch\.float64",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_model_that_was_changed_is_not_taken_for_its_architecture(change):
    """A class, a child, a hook, a forward or a constant that is not the architecture's own."""
    model = tiny("llama")
    change(model)
    with pytest.raises(UnsupportedModelError, match=CHANGES[change]):
        Architecture(model, "portable")


@pytest.mark.parametrize("change", [doubled, with_a_hook, with_an_epsilon], ids=lambda change: change.__name__)
def test_a_changed_model_is_run_as_it_is(change):
    """By transformers."""
    model = tiny("llama")
    change(model)
    reason_of(model)


def test_hidden_states_that_were_once_looked_at_change_nothing():
    """transformers then leaves hooks behind."""
    model = tiny("llama")
    with torch.no_grad():
        model(torch.tensor([TOKENS]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    assert NativeVerifier(model).describe()["engine"] == "native"


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
        ("llama", {"hidden_act": "relu"}, "activation of its MLP is ReLU"),
        ("gemma3", {"use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_options_that_the_engine_does_not_have_are_a_reason(family, options, reason):
    """The message names the option."""
    with pytest.raises(UnsupportedModelError, match=reason):
        Architecture(tiny(family, **options), "portable")


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("llama", {"gemma": False, "windows": "all"}),
        ("mistral_window", {"windows": "none"}),
        ("gemma2", {"attention_soft_cap": False}),
    ],
)
def test_a_detail_that_was_missed_is_found_by_trying(monkeypatch, family, wrong):
    """Logits on a few tokens are compared with the model's, across windows that are short enough."""
    options = {"attn_logit_softcapping": 1.0} if family == "gemma2" else {}
    model = tiny(family, **options)
    if family == "llama":
        model.config.sliding_window = 4
    kind = model.config.model_type
    monkeypatch.setitem(families.FAMILIES, kind, attrs.evolve(families.FAMILIES[kind], **wrong))
    assert "logits differ from the model's by" in reason_of(model)


@pytest.mark.parametrize("quantized", [False, True])
def test_wrong_frequencies_are_found_by_trying(monkeypatch, quantized):
    """Also where rounding to integers excuses small differences."""
    plain = _native.ModelBuilder.add_rope
    monkeypatch.setattr(_native.ModelBuilder, "add_rope", lambda self, f, scaling: plain(self, f * 0.5, scaling))
    model = tiny("llama")
    assert "rounding explains" in reason_of(W8A8Quantizer().quantize(model).model if quantized else model)


def test_a_model_in_training_mode_is_run_in_evaluation_mode():
    """The user's model stays in its mode."""
    model = tiny("llama", attention_dropout=0.5)
    expected = plain_logits(model, TOKENS)
    model.train()
    verifier = NativeVerifier(model)
    assert model.training
    assert verifier.describe()["engine"] == "native"
    torch.testing.assert_close(verifier.start(TOKENS[:1]).verify(Draft(TOKENS[1:])).logits, expected, rtol=0, atol=1e-4)


OUT_OF_MEMORY = """
import resource, torch
from quasar.testing.models import tiny
from quasar.types import EMPTY_DRAFT
from quasar_native.verifier import NativeVerifier
sizes = {"head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 100000}
verifier = NativeVerifier(tiny("llama", **sizes), threads=1)
session = verifier.start([5, 6, 7])
expected = session.verify(EMPTY_DRAFT).logits
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
try:
    verifier.start([5] * 20000).verify(EMPTY_DRAFT)
except MemoryError:
    assert torch.equal(session.verify(EMPTY_DRAFT).logits, expected)
    print("a MemoryError, and the rest goes on")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer reserves terabytes of addresses")
def test_memory_that_runs_out_is_a_memory_error():
    """The process lives on, and so do other sessions."""
    done = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "a MemoryError, and the rest goes on", done.stderr
