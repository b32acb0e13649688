"""Constrained output: it fits the constraint, and speculation gives the tokens of plain decoding."""

from __future__ import annotations

import copy
import gc
import json
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from quasar import Pipeline
from quasar.drafters.function import FunctionDrafter
from quasar.errors import InvalidRequestError, NumericalError
from quasar.loop.sampling import Sampling
from quasar.loop.stats import DecodeStats
from quasar.loop.stopping import Stopping
from quasar.pipeline import constraints
from quasar.pipeline.prompts import encode_prompt
from quasar.testing.fakes import TableLM, scripted
from quasar.testing.running import examples
from strategies import Case, steps
from test_decode import run, tokens_of
from test_processing import reference
from toys import MERGES, LooksAhead, character_tokenizer, word_tokenizer

pytest.importorskip("llguidance")


TOKENIZER = character_tokenizer()
EOS = TOKENIZER.eos_token_id
SCHEMA = {
    "type": "object",
    "properties": {"ab": {"type": "integer"}, "c": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["ab", "c"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PATTERN = "[abc]{3,9}(,[0-9]{1,3}){2,6}"
GRAMMAR = 'start: "a" start "b" | "[" start "]" | "12" | "c"'


@attrs.frozen
class Kind:
    """A constraint, and what is true of a complete output."""

    make: Callable[[], constraints.Constraint]
    is_met_by: Callable[[str], bool]


def is_in_schema(text: str) -> bool:
    found = json.loads(text)
    flags = found["c"]
    return found.keys() == {"ab", "c"} and type(found["ab"]) is int and all(type(flag) is bool for flag in flags)


def is_in_grammar(text: str) -> bool:
    """Strip pairs from both ends until the middle is left."""
    while text not in ("12", "c"):
        if len(text) < 3 or text[0] + text[-1] not in ("ab", "[]"):
            return False
        text = text[1:-1]
    return True


KINDS = {
    "schema": Kind(lambda: constraints.json_schema(SCHEMA, TOKENIZER), is_in_schema),
    "regex": Kind(lambda: constraints.regex(PATTERN, TOKENIZER), lambda text: re.fullmatch(PATTERN, text) is not None),
    "lark": Kind(lambda: constraints.lark(GRAMMAR, TOKENIZER), is_in_grammar),
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any prompt and drafter, with or without a stop at EOS; the target has more ids than the tokenizer, or fewer."""
    vocab_size = len(TOKENIZER) + draw(st.sampled_from([0, 7, -1]))
    return Case(
        vocab_size=vocab_size,
        seed=draw(st.integers(0, 10**6)),
        levels=draw(st.sampled_from([2, 3, 1000])),
        prompt_ids=tuple(draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=8))),
        max_new_tokens=draw(st.integers(1, 40)),
        eos_token_ids=draw(st.sampled_from([EOS, EOS, None])),
        stop=(),
        criterion_token=None,
        steps=tuple(draw(st.lists(steps(vocab_size), min_size=1, max_size=5))),
    )


class Watched:
    """A drafter of any behaviour that knows the output, and a processor that watches what becomes of its drafts."""

    def __init__(self, case: Case, own: list[int]) -> None:
        self._case, self._own, self._n, self._turn = case, own, 0, iter(range(10**9))
        self.in_mid_draft = 0

    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        self._n = len(token_ids)
        step = self._case.steps[next(self._turn) % len(self._case.steps)]
        n = len(token_ids) - len(self._case.prompt_ids)
        return [*self._own[n : n + step.n_right % 5], *step.junk]  # few: the output should take several steps

    def watcher(self) -> Callable:
        """A row without a choice follows a forbidden token: is it the second of its draft or a later one?"""

        def watch(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.in_mid_draft += bool(scores.amax() == -float("inf")) and input_ids.shape[1] >= self._n + 2
            return scores

        return watch  # no method: a deep copy of one would copy the object, and count there


def speculative(case: Case, constraint: object, own: list[int], sampling: Sampling) -> tuple[list[int], Counter[str]]:
    """The tokens of the loop, and what occurred on the way."""
    watched, stats = Watched(case, own), DecodeStats()
    emissions = run(
        case.prompt_ids,
        drafter=FunctionDrafter(watched.propose),
        verifier=case.target(),
        policy=LooksAhead(),
        sampling=sampling,
        stopping=Stopping(case.max_new_tokens, eos_token_ids=case.eos_token_ids),
        processors=[constraint, watched.watcher()],
        stats=stats,
    )
    seen = {
        "accepted": stats.accepted_tokens > 0,
        "rejected": stats.accepted_tokens < stats.drafted_tokens,
        "forbidden in mid-draft": watched.in_mid_draft > 0,
    }
    return tokens_of(emissions), Counter({name: int(value) for name, value in seen.items()})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constrained_output_is_that_of_plain_decoding_and_fits(kind, temperature):
    """Token-identical for any drafter; what ended with EOS fits, and nothing but EOS follows EOS."""
    constraint, seen = KINDS[kind].make(), Counter()

    @examples(100)
    @given(cases(), st.integers(0, 1000))
    def check(case: Case, seed: int) -> None:
        sampling = Sampling(temperature=temperature, seed=seed)
        own = reference(case, [constraint], sampling)
        tokens, events = speculative(case, constraint, own, sampling)
        assert tokens == own
        if EOS in own:
            end = own.index(EOS)
            assert KINDS[kind].is_met_by(TOKENIZER.decode(own[:end]))
            assert set(own[end:]) == {EOS}
        seen.update(events + Counter(complete=int(EOS in own), changed=int(own != reference(case, [], sampling))))

    check()
    expected = ("accepted", "rejected", "forbidden in mid-draft", "complete", "changed")
    assert min(seen[event] for event in expected) >= 5, seen


class SharesItsMatcher:
    """Planted bug: the copies of all positions move one matcher."""

    def __init__(self, constraint: constraints.Constraint) -> None:
        self.constraint = constraint

    def __call__(self, input_ids, scores):
        return self.constraint(input_ids, scores)

    def __deepcopy__(self, memo):
        return self


def test_a_shared_matcher_would_be_found():
    """The same comparison fails with the planted bug in some case, so the property can fail."""
    differs = 0

    @examples(60)
    @given(cases())
    def check(case: Case) -> None:
        nonlocal differs
        good = KINDS["regex"].make()
        bad = SharesItsMatcher(KINDS["regex"].make())
        own = reference(case, [good], Sampling())
        try:
            differs += speculative(case, bad, own, Sampling())[0] != own
        except NumericalError:
            differs += 1

    check()
    assert differs >= 5


def scores_of(n: int = len(TOKENIZER), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(n, dtype=dtype).unsqueeze(0)


def texts_after(constraint: constraints.Constraint, text: str, n: int = len(TOKENIZER)) -> list[str]:
    """What may follow the prompt "f" and ``text``, one token at a time as in a generation."""
    token_ids = [TOKENIZER.convert_tokens_to_ids("f")]
    scores = constraint(torch.tensor([token_ids]), scores_of(n))
    for token_id in TOKENIZER(text)["input_ids"]:
        token_ids.append(token_id)
        scores = constraint(torch.tensor([token_ids]), scores_of(n))
    return TOKENIZER.convert_ids_to_tokens(scores[0].isfinite().nonzero().flatten().tolist())


@pytest.mark.parametrize(
    ("pattern", "text", "following"),
    [
        ("a[bc]1?", "", ["a", "ab"]),
        ("a[bc]1?", "a", ["b", "c"]),
        ("a[bc]1?", "ac", ["<eos>", "1"]),
        ("a[bc]1?", "ac1", ["<eos>"]),
        ("a[bc]1?", "ac1<eos>", ["<eos>"]),
        ("a[bc]1?", "ac1<eos><eos>", ["<eos>"]),
        ("a[bc]1?", "ac1<eos>a", []),
        ("a[bc]1?", "d", []),
        ("a[bc]1?", "da", []),
        ("a[bc]1?", "<eos>", []),
        ("é", "", []),
        ("aé", "a", []),
    ],
)
def test_what_may_follow(pattern, text, following):
    """EOS alone where the output is complete; nothing after a token that does not fit, or where none can follow."""
    assert texts_after(constraints.regex(pattern, TOKENIZER), text) == following


@pytest.mark.parametrize("n", [3, len(TOKENIZER) - 1 - len(MERGES), len(TOKENIZER) + 1, len(TOKENIZER) + 100])
def test_ids_that_the_tokenizer_or_the_target_does_not_have_are_not_chosen(n):
    """The vocabulary of a target may be padded, or lack tokens that were added to the tokenizer."""
    expected = [piece for piece in ("a", "ab") if TOKENIZER.convert_tokens_to_ids(piece) < n]
    assert texts_after(constraints.regex("a|ab|é", TOKENIZER), "", n) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_keep_their_dtype_and_their_values(dtype):
    """Those that are allowed; the tensor that was given is left as it is."""
    given_scores = scores_of(dtype=dtype)
    scores = constraints.regex("[a-z]", TOKENIZER)(torch.tensor([[1]]), given_scores)
    assert scores.dtype == dtype
    kept = scores.isfinite()
    assert kept.sum() == 26
    assert torch.equal(scores[kept], given_scores[kept])
    assert torch.equal(given_scores, scores_of(dtype=dtype))


def test_copies_go_on_by_themselves():
    """From where the original stood, and without moving it."""
    first = constraints.regex("a[bc]1?", TOKENIZER)
    a, c, d = TOKENIZER.convert_tokens_to_ids(["a", "c", "d"])
    first(torch.tensor([[7, 7]]), scores_of())
    first(torch.tensor([[7, 7, a]]), scores_of())
    right, wrong = copy.deepcopy(first), copy.deepcopy(first)
    assert wrong(torch.tensor([[7, 7, a, d]]), scores_of()).isfinite().sum() == 0
    assert right(torch.tensor([[7, 7, a, c]]), scores_of()).isfinite().sum() == 2
    assert first(torch.tensor([[7, 7, a, c]]), scores_of()).isfinite().sum() == 2


def pipeline(**options: object) -> Pipeline:
    return Pipeline(TableLM(len(TOKENIZER), seed=1), TOKENIZER, eos_token_ids=EOS, **options)


def test_one_object_serves_generations_that_run_at_once():
    """Also where their prompts differ in length."""
    pipe, constraint = pipeline(), KINDS["lark"].make()
    options = {"logits_processors": [constraint], "max_new_tokens": 30}
    prompts = ["a", "abc:", "12"]
    alone = [pipe.reference(prompt, **options).text for prompt in prompts]
    streams = [pipe.stream(prompt, **options) for prompt in prompts]
    while [chunk for stream in streams for chunk in [next(stream, None)] if chunk is not None]:
        pass
    assert [stream.result.text for stream in streams] == alone
    assert all(stream.result.finish_reason == "eos" and is_in_grammar(stream.result.text) for stream in streams)


def test_an_output_that_the_tokens_cannot_spell_is_an_error():
    """Not an EOS after half of it."""
    for pipe in (pipeline(), pipeline(drafter=lambda token_ids, k: token_ids[-1:] * k)):
        with pytest.raises(NumericalError, match="leave no token"):
            pipe.generate("a", logits_processors=[constraints.regex("aé", TOKENIZER)])


MISTAKES = {
    "schema, no JSON": (lambda: constraints.json_schema("{", TOKENIZER), "the JSON schema is not JSON: Expecting"),
    "schema, a set": (lambda: constraints.json_schema({"enum": {1}}, TOKENIZER), "the JSON schema is not JSON: Object"),
    "schema, NaN": (lambda: constraints.json_schema({"enum": [float("nan")]}, TOKENIZER), "is not JSON: Out of range"),
    "schema, a list": (lambda: constraints.json_schema("[1]", TOKENIZER), "the JSON schema is '[1]'; give an object"),
    "schema, type": (
        lambda: constraints.json_schema({"type": "text"}, TOKENIZER),
        "the JSON schema cannot be used: Invalid type: text",
    ),
    "schema, unimplemented": (
        lambda: constraints.json_schema({"contains": {}}, TOKENIZER),
        'the JSON schema cannot be used: Unimplemented keys: ["contains"]',
    ),
    "regex": (
        lambda: constraints.regex("(a", TOKENIZER),
        "the regular expression cannot be used: at 1(8): invalid regex",
    ),
    "regex, cause": (lambda: constraints.regex("(a", TOKENIZER), "error: unclosed group"),
    "regex, no text": (lambda: constraints.regex(3, TOKENIZER), "'int' object"),
    "regex, half a character": (
        lambda: constraints.regex("\ud800", TOKENIZER),
        "the regular expression cannot be used",
    ),
    "grammar": (
        lambda: constraints.lark("start: x", TOKENIZER),
        "the grammar cannot be used: at 1(8): unknown name",
    ),
    "grammar, none": (lambda: constraints.lark("", TOKENIZER), "the grammar cannot be used: Empty grammar"),
    "no tokenizer": (
        lambda: constraints.regex("a", None),
        "a fast transformers tokenizer, and this is a NoneType",
    ),
    "tokenizer without EOS": (
        lambda: constraints.regex("a", character_tokenizer(eos_token=None)),
        "ends with the tokenizer's EOS token, and this one has none",
    ),
    "tokenizer without decoder": (
        lambda: constraints.regex("a", word_tokenizer()),
        "the tokenizer cannot be used: can't determine decoder type",
    ),
    "check of a schema": (lambda: constraints.check_json_schema({"type": "text"}), "Invalid type: text"),
    "check of a regex": (lambda: constraints.check_regex("(a"), "error: unclosed group"),
}


@pytest.mark.parametrize(("make", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line(make, message, capfd):
    """It says what is wrong with what, and llguidance prints nothing of its own."""
    with pytest.raises(InvalidRequestError) as error:
        make()
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_what_can_be_used_passes_the_checks():
    constraints.check_json_schema(SCHEMA)
    constraints.check_json_schema(json.dumps(SCHEMA))
    constraints.check_regex(PATTERN)


@pytest.mark.parametrize(
    "make",
    [
        lambda: constraints.json_schema(SCHEMA, TOKENIZER),
        lambda: constraints.regex("a", TOKENIZER),
        lambda: constraints.lark(GRAMMAR, TOKENIZER),
        lambda: constraints.check_regex("a"),
    ],
)
def test_without_the_library_the_extra_is_named(monkeypatch, make):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.delitem(sys.modules, "llguidance.hf", raising=False)
    with pytest.raises(InvalidRequestError, match=r"needs llguidance; .*pip install 'quasar-decode\[constraints\]'"):
        make()


def test_a_tokenizer_is_adapted_once_and_anew_when_it_changed(monkeypatch):
    """And forgotten with the tokenizer."""
    built = []
    adapt = pytest.importorskip("llguidance.hf").from_tokenizer
    monkeypatch.setattr("llguidance.hf.from_tokenizer", lambda *a: built.append(1) or adapt(*a))
    tokenizer: PreTrainedTokenizerFast | None = character_tokenizer()
    alive = weakref.ref(tokenizer)
    first = constraints.regex("a|zz", tokenizer)
    constraints.lark(GRAMMAR, tokenizer)
    assert len(built) == 1
    tokenizer.add_tokens(["zz"])
    second = constraints.regex("a|zz", tokenizer)
    assert len(built) == 2
    counts = [c(torch.tensor([[1]]), scores_of(100)).isfinite().sum() for c in (first, second)]
    assert counts == [2, 3]
    tokenizer = None
    gc.collect()
    assert alive() is None


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUESTION = "Describe a person of your choice as a JSON object with name and age."


@pytest.mark.real_model
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_a_real_model_fills_in_a_schema(smollm2, options):
    """What json.loads reads has both fields; n-gram drafts, and drafts that know it, change no token."""
    pipe = Pipeline.from_model(smollm2.model, smollm2.tokenizer, quantizer="none", drafter="ngram")
    asked = {
        "logits_processors": [constraints.json_schema(PERSON, smollm2.tokenizer)],
        "max_new_tokens": 40,
        **options,
    }
    own = pipe.reference(QUESTION, **asked)
    found = json.loads(own.text)
    assert own.finish_reason == "eos"
    assert found.keys() == {"name", "age"}
    assert isinstance(found["name"], str)
    assert isinstance(found["age"], int)
    free = pipe.generate(QUESTION, **{**asked, "logits_processors": [], "max_new_tokens": 8})
    assert own.token_ids[:8] != free.token_ids
    assert pipe.generate(QUESTION, **asked).token_ids == own.token_ids
    n_prompt = len(encode_prompt(smollm2.tokenizer, QUESTION))
    pipe.drafter = FunctionDrafter(scripted(n_prompt, own.token_ids, 6, 5, pipe.verifier.vocab_size))
    drafted = pipe.generate(QUESTION, **asked)
    assert drafted.token_ids == own.token_ids
    assert drafted.stats["accepted_tokens"] > 0
