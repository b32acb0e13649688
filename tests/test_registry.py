"""Spec strings, unknown names and options, and what may be passed in place of a name."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quasar.drafters.function import FunctionDrafter
from quasar.drafters.ngram import NgramDrafter
from quasar.drafters.none import EmptyDrafter
from quasar.errors import InvalidRequestError, PluginError, UnknownStrategyError, UnsupportedModelError
from quasar.loop.checks import start_drafting, start_verifying
from quasar.loop.sampling import Sampling
from quasar.pipeline.pipeline import Pipeline
from quasar.policies.coupled import CoupledPolicy
from quasar.policies.greedy import GreedyPolicy
from quasar.policies.margin import MarginPolicy
from quasar.quantizers.none import NoQuantizer
from quasar.registry.plugins import Entry, LoadedPlugin, Origin
from quasar.registry.registry import Registry, default_registry
from quasar.registry.spec import parse_spec
from quasar.testing.fakes import TableLM
from quasar.verifiers.causal_lm import CausalLMVerifier

ORIGIN = Origin("acme-plugin", "1.0", "plugin")


def registry_of(**factories: object) -> Registry:
    """A registry of drafters made by these factories."""
    entries = tuple(Entry("drafter", name, factory, ORIGIN) for name, factory in factories.items())
    return Registry([LoadedPlugin(ORIGIN, entries)])


def reads_as_text(value: str) -> bool:
    """Whether a value stays text in a spec string."""
    try:
        float(value)
    except ValueError:
        return value.lower() not in ("true", "false") and value == value.strip() != ""
    return False


NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", fullmatch=True)
TEXTS = st.text(st.characters(exclude_characters=",()", exclude_categories=["C", "Z"])).filter(reads_as_text)
VALUES = st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS


KEYS = st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True)


def specs(depth: int = 3) -> st.SearchStrategy[tuple[str, dict]]:
    """E.g. ``("a", {"k": 5, "inner": ("b", {"path": "x=1", "inner": ("c", {})})})``."""
    value = VALUES if depth == 0 else VALUES | specs(depth - 1)
    return st.tuples(NAMES, st.dictionaries(KEYS, value, max_size=3))


def written(spec: tuple[str, dict], space: str) -> str:
    """The spec string, with what is nested in parentheses."""
    name, options = spec
    parts = [
        f"{space}{key}={space}({written(value, space)}){space}" if isinstance(value, tuple) else f"{key}={value}{space}"
        for key, value in options.items()
    ]
    return f"{space}{name}:{','.join(parts)}"


def read(spec: str, like: tuple[str, dict]) -> tuple[str, dict]:
    """Parsed to the depth to which ``like`` is nested."""
    name, options = parse_spec(spec)
    nested = {key: value for key, value in like[1].items() if isinstance(value, tuple)}
    return name, {key: read(text, nested[key]) if key in nested else text for key, text in options.items()}


@given(specs(), st.sampled_from(["", " "]))
def test_what_stands_in_parentheses_is_a_spec_string_of_its_own(spec, space):
    """To any depth: commas, colons and equals signs inside are no business of what is outside."""
    assert read(written(spec, space), spec) == spec


BALANCED = st.recursive(
    st.text(st.characters(exclude_characters="()")),
    lambda inner: st.builds("{}({}){}".format, inner, inner, inner),
)


@given(BALANCED, BALANCED)
def test_any_text_with_balanced_parentheses_can_be_a_value(text, other):
    """In parentheses it comes back as it is: also what reads as a number, white space and nothing at all."""
    assert parse_spec(f"x:a=({text}),b=({other})") == ("x", {"a": text, "b": other})


@given(BALANCED, BALANCED, st.sampled_from("()"))
def test_one_parenthesis_too_many_is_refused(before, after, parenthesis):
    """Wherever it stands in the options; the message shows the whole."""
    spec = f"x:a={before}{parenthesis}{after}"
    with pytest.raises(InvalidRequestError) as caught:
        parse_spec(spec)
    other = ")" if parenthesis == "(" else "("
    assert str(caught.value) == f"{spec!r} has a {parenthesis!r} without its {other!r}"


@given(NAMES, st.dictionaries(KEYS, VALUES), st.sampled_from(["", " "]))
def test_a_spec_string_is_read_as_it_was_written(name, options, space):
    """Name and options come back with their types; white space around them means nothing."""
    parts = [f"{space}{key}{space}={space}{value}{space}" for key, value in options.items()]
    read_name, found = parse_spec(f"{space}{name}:{','.join(parts)}" if options else name)
    assert read_name == name
    assert [(key, type(value), value) for key, value in found.items()] == [
        (key, type(value), value) for key, value in options.items()
    ]


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("ngram", {}),
        ("ngram:", {}),
        ("x:k=5", {"k": 5}),
        ("x:k=-5", {"k": -5}),
        ("x:k=5.0", {"k": 5.0}),
        ("x:k=1e-3", {"k": 0.001}),
        ("x:k=TRUE,j=false", {"k": True, "j": False}),
        ("x:path=C:\\models=new", {"path": "C:\\models=new"}),
        ("x:k=none", {"k": "none"}),
        ("x:k=(5)", {"k": "5"}),
        ("x:k=((5))", {"k": "(5)"}),
        ("x:k=()", {"k": ""}),
        ("x:k=(a)(b)", {"k": "(a)(b)"}),
        ("x:k=/models/new (1, 2)", {"k": "/models/new (1, 2)"}),
        (
            "nested:drafter=(ngram:k=3,max_n=2),quantizer=(w8a8:lm_head=true),k=16",
            {"drafter": "ngram:k=3,max_n=2", "quantizer": "w8a8:lm_head=true", "k": 16},
        ),
    ],
)
def test_values_are_numbers_and_booleans_where_they_read_so(spec, options):
    """Everything else stays text, and only the first ':' and the first '=' of an option divide.

    What stands in parentheses stays text too; around a part of a value they only protect its commas.
    """
    found = parse_spec(spec)[1]
    assert found == options
    assert [type(value) for value in found.values()] == [type(value) for value in options.values()]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "'' has no name; write 'name' or 'name:option=value,option=value'"),
        ("  ", "'  ' has no name"),
        (":k=5", "':k=5' has no name"),
        ("ngram:k", "'k' in 'ngram:k' is not option=value"),
        ("ngram:k=", "'k=' in 'ngram:k=' is not option=value"),
        ("ngram:=5", "'=5' in 'ngram:=5' is not option=value"),
        ("ngram:k=5,", "'' in 'ngram:k=5,' is not option=value"),
        ("ngram:k=5 max_n=3,min_n", "'min_n' in 'ngram:k=5 max_n=3,min_n' is not option=value"),
        ("ngram:k=5,k=6", "option 'k' is given twice in 'ngram:k=5,k=6'"),
        ("nested:drafter=(ngram:k=3", "'nested:drafter=(ngram:k=3' has a '(' without its ')'"),
        ("nested:drafter=ngram:k=3),k=9", "'nested:drafter=ngram:k=3),k=9' has a ')' without its '('"),
        ("nested:a=)(", "'nested:a=)(' has a ')' without its '('"),
        ("nested:(k=3)", "'(k=3)' in 'nested:(k=3)' is not option=value"),
        ("(ngram:k=3)", "'(ngram:k=3)': parentheses go around a value, as in 'name:option=(…)'"),
        ("ngram(k=3)", "'ngram(k=3)': parentheses go around a value"),
    ],
)
def test_a_spec_string_that_cannot_be_read_is_refused(spec, message):
    """The message shows the part at fault and the whole."""
    with pytest.raises(InvalidRequestError) as caught:
        parse_spec(spec)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "spec", "fragments"),
    [
        ("drafter", "ngrm", ["no drafter named 'ngrm'. Did you mean 'ngram'? Installed: model, nested, ngram, none"]),
        ("drafter", "ngrm:k=5", ["no drafter named 'ngrm'", "Did you mean 'ngram'?"]),
        ("drafter", "w8a8", ["no drafter named 'w8a8'. Installed: model, nested, ngram, none"]),
        ("quantizer", "w8a", ["no quantizer named 'w8a'", "Did you mean 'w8a8'?"]),
        ("policy", "greed", ["no policy named 'greed'. Did you mean 'greedy'? Installed: block, coupled, "]),
        ("policy", "coupling", ["no policy named 'coupling'", "Did you mean 'coupled'?"]),
        ("verifier", "causal-lm", ["no verifier named 'causal-lm'", "Did you mean 'causal_lm'?"]),
        ("kernel", "native", ["no kernel named 'native'. Installed: dense, reference, torch"]),
    ],
)
def test_an_unknown_name_is_refused_with_what_is_installed(kind, spec, fragments):
    """Kind and name, the nearest one if there is a near one, and then all that are installed."""
    with pytest.raises(UnknownStrategyError) as caught:
        default_registry().build(kind, spec)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert ("Did you mean" in str(caught.value)) == any("Did you mean" in fragment for fragment in fragments)


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        ("drafter", "ngram:kk=5", "[builtins] has no option 'kk'; its options: k, max_n, min_n. Did you mean 'k'?"),
        ("drafter", "ngram:max_m=5", "has no option 'max_m'; its options: k, max_n, min_n. Did you mean 'max_n'?"),
        ("drafter", "ngram:temperature=5", "has no option 'temperature'; its options: k, max_n, min_n."),
        (
            "drafter",
            "none:k=5",
            "[builtins] has no option 'k'; its options: none.",
        ),
        ("policy", "greedy:k=5", "[builtins] has no option 'k'; its options: none."),
        ("policy", "coupled:k=5", "[builtins] has no option 'k'; its options: none."),
        ("policy", "margin:margn=0.2", "has no option 'margn'; its options: margin. Did you mean 'margin'?"),
        ("policy", "typical:lossless=true", "has no option 'lossless'; its options: epsilon, alpha."),
        ("drafter", "ngram:needs=5", "has no option 'needs'"),
        ("drafter", "ngram:k=0", "ngram: k=0, expected an integer of at least 1"),
        ("drafter", "ngram:k=2.5", "ngram: k=2.5, expected an integer of at least 1"),
        ("drafter", "ngram:k=many", "ngram: k='many', expected an integer of at least 1"),
        ("drafter", "ngram:k=true", "ngram: k=True, expected an integer of at least 1"),
        ("drafter", "ngram:min_n=4,max_n=3", "ngram: min_n=4 is greater than max_n=3"),
        ("drafter", "nested:drafter=(ngram:kk=5)", "has no option 'kk'; its options: k, max_n, min_n."),
        ("drafter", "nested:drafter=ngrm", "no drafter named 'ngrm'. Did you mean 'ngram'?"),
        (
            "drafter",
            "nested:drafter=(nested:quantizer=(w8a8:alhpa=0))",
            "has no option 'alhpa'; its options: group, smooth",
        ),
        ("drafter", "nested:quantizer=w8a9", "no quantizer named 'w8a9'. Did you mean 'w8a8'?"),
        ("drafter", "nested:verifier=(causal_ml)", "no verifier named 'causal_ml'. Did you mean 'causal_lm'?"),
        ("drafter", "nested:verifier=5", "verifier=int object: give a spec string, or a function"),
        ("drafter", "nested:k=4", "k=4, min_k=8, max_k=32; expected 1 ≤ min_k ≤ k ≤ max_k"),
        ("drafter", "nested:k=16.5", "k=16.5: give an integer of at least 1"),
        ("drafter", "nested:k=many", "k='many': give an integer of at least 1"),
        ("drafter", "nested:min_margin=-1", "min_margin=-1: give a number of at least 0"),
        ("drafter", "nested:min_margin=nan", "min_margin=nan: give a number of at least 0"),
        ("drafter", "nested:min_margin=wide", "min_margin='wide': give a number of at least 0"),
        ("drafter", "nested:with_probs=yes", "with_probs='yes': give true or false"),
        ("drafter", "nested:vocab_size=9", "has no option 'vocab_size'; its options: drafter, quantizer, verifier, k"),
        ("drafter", "model", "needs the option 'name'; write NAME:name=…"),
        ("drafter", "model:name=5", "model: name=5, expected the model that drafts, as in model:name=FOLDER"),
        ("drafter", "model:name=smollm2/x,k=0", "k=0: give an integer of at least 1"),
        ("drafter", "model:name=smollm2/x,any_vocabulary=1", "model: any_vocabulary=1, expected true or false"),
        ("drafter", "model:name=smollm2/x,dtype=int8", "dtype='int8' is not a floating-point dtype"),
    ],
)
def test_options_that_a_strategy_does_not_take_are_refused(kind, spec, message):
    """An option of no such name, or a value out of range."""
    with pytest.raises(InvalidRequestError) as caught:
        default_registry().build(kind, spec)
    assert message in str(caught.value)


def test_options_reach_the_strategy():
    """A spec string is worth as much as the constructor."""
    assert default_registry().build("drafter", "ngram:k=7,max_n=4,min_n=2") == NgramDrafter(k=7, max_n=4, min_n=2)
    assert default_registry().build("policy", "margin:margin=0.3") == MarginPolicy(margin=0.3)


def fails(error: Exception):
    """A factory that raises."""

    def factory(size=1):
        raise error

    return factory


@pytest.mark.parametrize(
    ("factory", "kind", "message"),
    [
        (fails(ValueError("size must be even")), InvalidRequestError, "refused 'it:size=3': size must be even"),
        (fails(TypeError("no int")), InvalidRequestError, "refused 'it:size=3': no int"),
        (fails(OSError("disk full")), PluginError, "failed to start: OSError: disk full"),
        (fails(InvalidRequestError("as it is")), InvalidRequestError, "as it is"),
        (
            lambda size: None,
            PluginError,
            "has no method start(prompt_ids, sampling, target), which a",
        ),
        (lambda size: EmptyDrafter, PluginError, "is the class EmptyDrafter itself, expected an instance"),
        (lambda size, path: None, InvalidRequestError, "needs the option 'path'; write NAME:path=…"),
        ("no_such_module:Thing", PluginError, "no_such_module:Thing cannot be imported: ModuleNotFoundError"),
        ("math:no.such", PluginError, "math:no.such cannot be imported: AttributeError"),
        ("math:pi", PluginError, "math:pi is float, expected a callable"),
    ],
)
def test_a_factory_that_fails_is_named_with_its_origin(factory, kind, message):
    """A value that it refuses is the user's matter, anything else the plug-in's; the cause stays chained."""
    with pytest.raises(kind) as caught:
        registry_of(it=factory).build("drafter", "it:size=3")
    assert message in str(caught.value)
    assert message == "as it is" or "drafter 'it' of acme-plugin 1.0 [plugin]" in str(caught.value)


def test_a_factory_may_take_any_option():
    """``**options`` opts out of the check of names."""
    seen = {}
    registry_of(it=lambda **options: seen.update(options) or EmptyDrafter()).build("drafter", "it:a=1,b=x")
    assert seen == {"a": 1, "b": "x"}


def test_a_factory_may_return_a_function():
    """A plug-in's drafter can be a function too."""
    drafter = registry_of(it=lambda k=2: lambda token_ids, n: token_ids[:k]).build("drafter", "it:k=1")
    assert drafter.start([7, 8], Sampling(), None).propose(5).token_ids == (7,)


def test_an_option_can_be_checked_without_building():
    """As for a verifier, whose model is not loaded yet: its first argument is no option."""
    registry = default_registry()
    registry.check_spec("verifier", "causal_lm")
    registry.check_spec("verifier", object())
    with pytest.raises(InvalidRequestError, match="has no option 'model'; its options: strict"):
        registry.check_spec("verifier", "causal_lm:model=5")
    with pytest.raises(UnknownStrategyError, match="Did you mean 'causal_lm'"):
        registry.check_spec("verifier", "causal_ml")


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("drafter", NgramDrafter()),
        ("drafter", EmptyDrafter()),
        ("verifier", TableLM(4)),
        ("policy", GreedyPolicy()),
        ("policy", CoupledPolicy()),
        ("quantizer", NoQuantizer()),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_object_is_used_as_it_is(kind, strategy):
    """No copy, no wrapper."""
    assert default_registry().build(kind, strategy) is strategy


def test_a_function_is_a_drafter():
    """It gets all tokens so far and how many are wanted, and cannot touch the session's own list."""
    seen = []

    def last_one(token_ids, k):
        seen.append((list(token_ids), k))
        token_ids.clear()
        return [5] * k

    drafter = default_registry().build("drafter", last_one)
    assert isinstance(drafter, FunctionDrafter)
    session = drafter.start([1, 2], Sampling(), None)
    assert session.propose(2).token_ids == (5, 5)
    session.commit([5, 3], None)
    session.propose(1)
    assert seen == [([1, 2], 2), ([1, 2, 5, 3], 1)]


def alike(strategy: object, **members: object) -> object:
    """An instance that differs from ``strategy`` in these members."""
    return type("Alike", (type(strategy),), members)(*([4] if isinstance(strategy, TableLM) else []))


class Undeclared:
    """A policy of before there was sampling, but for its signature."""

    lossless = True

    def decide(self, draft, verification, sampling):
        raise AssertionError("never called")


class Bare:
    """A drafter without ``needs``."""

    def start(self, prompt_ids, sampling):
        return self


@pytest.mark.parametrize(
    ("kind", "strategy", "message"),
    [
        ("drafter", NgramDrafter, "the drafter NgramDrafter is the class NgramDrafter itself, expected an instance"),
        ("policy", GreedyPolicy, "is the class GreedyPolicy itself, expected an instance that is an AcceptancePolicy"),
        ("verifier", TableLM, "is the class TableLM itself, expected an instance that is a Verifier"),
        (
            "drafter",
            None,
            "the drafter None has no method start(prompt_ids, sampling, target), which a",
        ),
        ("drafter", 5, "the drafter 5 has no method start(prompt_ids, sampling, target)"),
        ("policy", lambda draft, verification, sampling: None, "has no method decide(draft, verification, sampling)"),
        ("drafter", Bare(), "has no attribute 'needs', which a Drafter must have"),
        ("policy", Undeclared(), "has no attribute 'drafter_invariant', which an AcceptancePolicy must have"),
        ("drafter", alike(EmptyDrafter(), needs=["logits"]), "declares needs=['logits']; give a frozenset of features"),
        ("drafter", alike(EmptyDrafter(), needs={"probs"}), "declares needs={'probs'}; give a frozenset of features"),
        ("verifier", alike(TableLM(4), invariance="exact"), "invariance='exact'; choose one of bitwise, argmax, none"),
        (
            "drafter",
            alike(EmptyDrafter(), start=lambda self: self),
            "Alike.start() cannot be called as Drafter.start(prompt_ids, sampling, target): too many",
        ),
        (
            "verifier",
            alike(TableLM(4), start=lambda self, prompt_ids, needs: self),
            "Alike.start(prompt_ids, needs) cannot be called as Verifier.start(prompt_ids, needs=frozenset()): missing",
        ),
        (
            "policy",
            alike(GreedyPolicy(), decide=lambda self, draft, verification, sampling, generator: None),
            "Alike.decide(draft, verification, sampling, generator) cannot be called as "
            "AcceptancePolicy.decide(draft, verification, sampling): missing a required argument: 'generator'",
        ),
        (
            "quantizer",
            alike(NoQuantizer(), quantize=lambda self, model: model),
            "Alike.quantize(model) cannot be called as Quantizer.quantize(model, calibration=None)",
        ),
        (
            "drafter",
            alike(EmptyDrafter(), bind=lambda self, model: self),
            "Alike.bind(model) cannot be called as Bindable.bind(model, tokenizer, calibration): ",
        ),
        (
            "drafter",
            alike(EmptyDrafter(), bind=None),
            "has no method bind(model, tokenizer, calibration), which a Bindable must have",
        ),
        (
            "drafter",
            lambda token_ids: [],
            "the drafter <lambda>(token_ids) cannot be called as (token_ids, k): ",
        ),
    ],
)
def test_an_object_that_does_not_fit_is_refused_when_it_is_given(kind, strategy, message):
    """The method, how it can be called and how it will be called; an attribute that is missing or means nothing."""
    with pytest.raises(PluginError) as caught:
        default_registry().build(kind, strategy)
    assert message in str(caught.value)


class WrongSession:
    """Both kinds of session, with one method that nobody can call."""

    def verify(self, draft, mask):
        raise AssertionError("never called")

    def propose(self):
        raise AssertionError("never called")

    def commit(self, token_ids, verification=None):
        raise AssertionError("never called")


def test_a_session_that_does_not_fit_is_refused_when_decoding_starts():
    """A session only exists then; the message names who made it, the method and both signatures."""
    drafter = alike(EmptyDrafter(), start=lambda self, prompt_ids, sampling: WrongSession())
    verifier = alike(TableLM(4), start=lambda self, prompt_ids, needs=frozenset(): WrongSession())
    refused = [
        (
            "WrongSession.propose() cannot be called as DraftSession.propose(max_tokens)",
            lambda: start_drafting(drafter, [1], Sampling(), TableLM(4).start([1])),
            lambda: Pipeline(TableLM(4), drafter=drafter).generate_ids([1], max_new_tokens=3),
        ),
        (
            "WrongSession.verify(draft, mask) cannot be called as VerifySession.verify(draft)",
            lambda: start_verifying(verifier, [1], frozenset()),
            lambda: Pipeline(verifier).generate_ids([1], max_new_tokens=3),
        ),
    ]
    for message, *calls in refused:
        for call in calls:
            with pytest.raises(PluginError) as caught:
                call()
            assert f"what Alike.start returned: {message}" in str(caught.value)


def test_strategies_are_listed_by_kind_and_name():
    """In the order of the hooks, whatever the order of plug-ins."""
    kinds = [entry.kind for entry in default_registry().entries()]
    expected = ["drafter", "verifier", "quantizer", "policy", "kernel", "checkpoint", "command"]
    assert list(dict.fromkeys(kinds)) == expected
    assert [entry.name for entry in registry_of(b=EmptyDrafter, a=EmptyDrafter).entries("drafter")] == ["a", "b"]


def test_infinite_values_are_numbers():
    """What Python reads as a float is one."""
    assert parse_spec("x:limit=inf")[1] == {"limit": math.inf}


class Fast(CausalLMVerifier):
    """A verifier for CPUs."""

    speed = 5

    @staticmethod
    def refuses(model):
        return None if model.device.type == "cpu" else "it runs on CPUs"


def with_verifiers(**factories) -> Registry:
    """A registry in which these are installed beside the built-ins."""
    entries = tuple(Entry("verifier", name, factory, ORIGIN) for name, factory in factories.items())
    return Registry([*default_registry().plugins, LoadedPlugin(ORIGIN, entries)])


def model_on(device: str) -> torch.nn.Module:
    model = torch.nn.Linear(1, 1, device=device)
    model.device = torch.device(device)
    return model


@pytest.mark.parametrize(("device", "expected"), [("cpu", "quick"), ("meta", "causal_lm")])
def test_the_fastest_verifier_that_does_not_refuse_is_the_default(device, expected):
    """What is asked for by name or as a function stays as it is, and what is not ranked is taken by name only."""
    installed = with_verifiers(quick=Fast, unranked=TableLM, broken="no_such_module:Thing")
    assert installed.resolve_verifier("auto", model_on(device)) == expected
    assert default_registry().resolve_verifier("auto", model_on(device)) == "causal_lm"
    assert installed.resolve_verifier("causal_lm", model_on(device)) == "causal_lm"
    assert installed.resolve_verifier(with_verifiers, model_on(device)) is with_verifiers
    installed.check_verifier("auto")


def test_a_rank_that_cannot_be_asked_is_refused_with_its_origin():
    """Half of an optional protocol is a mistake, not a choice."""

    class Half(CausalLMVerifier):
        refuses = None
        speed = 3

    with pytest.raises(PluginError, match=r"'half' of acme-plugin 1\.0 \[plugin\] has no method refuses"):
        with_verifiers(half=Half).resolve_verifier("auto", model_on("cpu"))


def test_a_model_that_every_verifier_refuses_is_refused_with_all_reasons(monkeypatch):
    monkeypatch.setattr(CausalLMVerifier, "refuses", staticmethod(lambda model: "it is Tuesday"))
    with pytest.raises(UnsupportedModelError, match="quick: it runs on CPUs; causal_lm: it is Tuesday"):
        with_verifiers(quick=Fast).resolve_verifier("auto", model_on("meta"))
