"""From texts and messages to token ids: what templates are given, what they refuse, and how that is said."""

from __future__ import annotations

import numpy as np
import pytest

from quasar.errors import InvalidRequestError
from quasar.pipeline.prompts import ChatFormat, encode, encode_prompt
from toys import CHAT_TEMPLATE, WORDS, word_tokenizer

CLOSED = "{% for m in messages %}{{ m['role'] }} says {{ m['content'] }} <eos> {% endfor %}"
CLOSED += "{% if add_generation_prompt %}answer{% endif %}"
USER = {"role": "user", "content": "the cat"}


def text_of(prompt, template=CLOSED, **form):
    """What the model reads, in the words of the toy tokenizer."""
    token_ids = encode_prompt(word_tokenizer(template), prompt, ChatFormat(**form))
    return " ".join(WORDS[token_id] for token_id in token_ids)


def refused(prompt, template=CLOSED, **form):
    with pytest.raises(InvalidRequestError) as caught:
        encode_prompt(word_tokenizer(template), prompt, ChatFormat(**form))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ messages[7]['content'] }}", "list object has no element 7"),
        ("{{ 1 / 0 }}", "division by zero"),
        ({"tool_use": "{{ messages }}"}, "tool_use"),
    ],
)
def test_a_template_that_fails_is_one_line_with_its_reason_and_the_way_round(template, reason):
    """Whatever a template raises, it is the template that is named, not a library."""
    message = refused("the cat", template)
    assert message.startswith("the model's chat template does not take this prompt: ")
    assert reason in message
    assert message.endswith("; a text with raw=True does without it")
    assert text_of("the cat", template, raw=True) == "the cat"


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text", "text": "the cat"}],
        [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}],
        ({"type": "text", "text": "the c"}, {"text": "at"}),
        ["the ", "cat"],
    ],
)
def test_parts_of_text_are_joined(content):
    assert text_of([{"role": "user", "content": content}]) == text_of([USER])


@pytest.mark.parametrize(
    "content",
    [None, 5, b"the cat", {"type": "text", "text": "x"}, [{"type": "image", "url": "x"}], [5], [{"text": None}]],
    ids=str,
)
def test_content_that_is_no_text_is_refused(content):
    """With its place, what it is and what would do."""
    message = refused([USER, {"role": "user", "content": content}])
    assert message.startswith("message 1 has the content ")
    assert message.endswith("; give a text, or a list of parts {'type': 'text', 'text': …}")


@pytest.mark.parametrize(
    ("role", "hint"),
    [
        ("usr", "did you mean 'user'?"),
        ("asistant", "did you mean 'assistant'?"),
        ("System", "did you mean 'system'?"),
        ("moon", "choose one of system, developer, user, assistant, tool, function"),
        (None, "choose one of"),
        (5, "choose one of"),
    ],
)
def test_a_role_that_no_model_knows_is_refused(role, hint):
    """Most templates would write it down, and the model would read a conversation of nobody."""
    message = refused([{"role": role, "content": "the cat"}])
    assert message.startswith(f"message 0 has the role {role!r}; ")
    assert hint in message


def test_a_role_that_the_template_names_is_taken():
    """Some models have roles of their own."""
    template = CLOSED + "{% if messages[0]['role'] == 'moon' %} moon{% endif %}"
    assert text_of([{"role": "moon", "content": "the cat"}], template) == "moon says the cat <eos> answer moon"


def test_the_last_message_of_the_assistant_is_continued():
    """Its turn is neither closed nor opened anew."""
    answer = {"role": "assistant", "content": "cat sat on"}
    assert text_of([USER, answer]) == "user says the cat <eos> <unk> says cat sat on"
    parts = {"role": "assistant", "content": [{"type": "text", "text": "cat sat on"}]}
    assert text_of([USER, parts]) == text_of([USER, answer])
    assert text_of([USER, answer, USER]).endswith("cat sat on <eos> user says the cat <eos> answer")


def test_an_answer_without_a_word_has_not_begun():
    assert text_of([USER, {"role": "assistant", "content": " "}]) == text_of([USER])


def test_a_call_of_a_tool_may_have_no_content():
    """As servers write it: the template decides what it makes of the call."""
    template = CLOSED.replace("{{ m['content'] }}", "{{ m['content'] or m['tool_calls'][0]['name'] }}")
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "moon"}]}
    assert text_of([USER, call, {"role": "tool", "content": "warm"}], template) == (
        "user says the cat <eos> <unk> says moon <eos> <unk> says warm <eos> answer"
    )


def test_options_and_tools_reach_the_template():
    """Under their own names."""
    template = "{% if tools %}{{ tools[0]['name'] }} {% endif %}{% if warm %}warm {% endif %}" + CLOSED
    assert text_of("cat", template, options={"warm": True}).startswith("warm user")
    assert text_of("cat", template, options={"warm": False}).startswith("user")
    assert text_of("cat", template, tools=[{"name": "moon"}]).startswith("moon user")
    assert text_of("cat", template, options={"add_generation_prompt": False}) == "user says cat <eos>"


@pytest.mark.parametrize("text", ["", " ", "\n\t "])
def test_a_blank_text_is_refused_unless_it_is_raw(text):
    """There is nothing to answer; a raw text is the user's own business, as long as it has a token."""
    assert refused(text).startswith("the prompt is blank, so there is nothing to answer")
    assert refused(text, raw=True) == "the prompt has no tokens; give at least one"


def test_messages_texts_and_ids_are_told_apart():
    tokenizer = word_tokenizer(CHAT_TEMPLATE)
    assert encode(tokenizer, "the cat") == encode(tokenizer, [USER]) == encode_prompt(tokenizer, [USER])
    assert encode(tokenizer, [5, 6]) == encode(tokenizer, np.array([[5, 6]])) == [5, 6]
