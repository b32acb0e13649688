"""Streamed text: what is emitted never changes, adds up to the whole, and ends before a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from quasar.loop.detokenize import IncrementalText, decode_tokens
from quasar.loop.stop_strings import TextStream
from quasar.loop.stopping import Stopping
from quasar.testing.fakes import ByteTokenizer
from quasar.testing.running import examples

BYTE_PIECES = [b"a", b" b", b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\x91\x8d", b"\xff", b"\xe6\x97\xa5\xe6", b""]


def streamed(tokenizer, pieces, stop=()):
    """The chunks that a stream emits for pieces of tokens, and the text that is left when it ends."""
    text = IncrementalText(tokenizer)
    stopping = Stopping(10**6, stop=stop, text=text)
    stream, chunks = TextStream(text, stop), []
    for piece in pieces:
        emission = stopping.truncate(piece)
        if emission.finish_reason is not None:
            break
        chunks.append(stream.advance())
    chunks.append(stream.finish(stopping.text_end))
    return chunks


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Sentencepiece style: ``▁`` for a space, unknown characters as runs of byte tokens, a leading space dropped."""
    pieces = [
        "<unk>",
        "▁",
        "a",
        "▁b",
        "日",
        *(f"<0x{byte:02X}>" for byte in (0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x91, 0x8D, 0xFF)),
    ]
    backend = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


TOKENIZERS = {"byte level": ByteTokenizer(BYTE_PIECES), "byte fallback": byte_fallback_tokenizer()}
SIZES = {"byte level": len(BYTE_PIECES), "byte fallback": 14}
EURO = {"byte level": [2, 3, 4], "byte fallback": [5, 6, 7]}


@st.composite
def pieces_of(draw: st.DrawFn, kind: str) -> list[list[int]]:
    """Tokens, some of them a euro sign in three, cut into pieces anywhere; e.g. ``[[0, 2], [3], [4, 7]]``."""
    parts = draw(st.lists(st.lists(st.integers(0, SIZES[kind] - 1), max_size=4) | st.just(EURO[kind]), max_size=8))
    token_ids = [token_id for part in parts for token_id in part]
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(token_ids) - 1)))))
    pieces = [token_ids[i:j] for i, j in zip([0, *cuts], [*cuts, len(token_ids)], strict=True)]
    return [piece for piece in pieces if piece]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_chunks_add_up_to_the_decoded_text_for_any_tokens_and_any_cuts(kind):
    """Valid or not, whole characters or not: the concatenation is what decoding all tokens at once gives."""
    tokenizer = TOKENIZERS[kind]
    seen = {"character across pieces": 0, "invalid bytes": 0}

    @examples(150)
    @given(pieces_of(kind))
    def check(pieces):
        whole = decode_tokens(tokenizer, [token_id for piece in pieces for token_id in piece])
        chunks = streamed(tokenizer, pieces)
        assert "".join(chunks) == whole
        assert sum(chunk.count("\ufffd") for chunk in chunks) == whole.count("\ufffd")
        seen["invalid bytes"] += "\ufffd" in whole
        for i in range(1, len(pieces)):
            head = decode_tokens(tokenizer, [token_id for piece in pieces[:i] for token_id in piece])
            seen["character across pieces"] += head.endswith("\ufffd") and not whole.startswith(head)

    check()
    assert min(seen.values()) >= 5, seen


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_invalid_bytes_do_not_stall_the_stream(kind):
    """After bytes that never become a character, the text goes on at the next token that is one."""
    tokenizer = TOKENIZERS[kind]
    bad, good = (7, 0) if kind == "byte level" else (12, 2)
    chunks = streamed(tokenizer, [[bad], [good], [good], [good]])
    assert chunks[1:4] == ["\ufffda", "a", "a"]


def test_a_stop_string_never_shows_whatever_the_pieces():
    """The text ends before the earliest stop string, and no chunk lets a part of it out."""
    tokenizer = ByteTokenizer([b"a", b"b", b"ab", b"\xe2\x82", b"\xac", b"aa", b"c"])
    seen = {"stopped": 0, "held back": 0}

    @examples(150)
    @given(
        st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), min_size=1, max_size=8),
        st.lists(st.text("abc€", min_size=1, max_size=4), min_size=1, max_size=3),
    )
    def check(pieces, stop):
        token_ids = [token_id for piece in pieces for token_id in piece]
        whole = decode_tokens(tokenizer, token_ids)
        # The token that first completes a stop string decides; of those that it completes, the one that begins first.
        prefixes = (decode_tokens(tokenizer, token_ids[: n + 1]) for n in range(len(token_ids)))
        ends = [[text.find(string) for string in stop if string in text] for text in prefixes]
        expected = next((whole[: min(found)] for found in ends if found), whole)
        chunks = streamed(tokenizer, pieces, stop)
        assert "".join(chunks) == expected
        seen["stopped"] += expected != whole
        seen["held back"] += chunks[:-1] != streamed(tokenizer, pieces)[: len(chunks) - 1]

    check()
    assert min(seen.values()) >= 5, seen


def test_special_tokens_do_not_show():
    """EOS is a token of the output but not of its text."""
    tokenizer = byte_fallback_tokenizer()
    eos = tokenizer.eos_token_id
    assert "".join(streamed(tokenizer, [[3, 2], [eos]])) == "ba"


@pytest.mark.real_model
@pytest.mark.parametrize(
    "text", ["👍", "👨‍👩‍👧‍👦 family", "日本語のテキスト", "한국어", "naïve café — “quoted”", "a\ufffdb"]
)
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_smollm2_streams_every_script_in_any_cut(smollm2, text, width):
    """Emoji, CJK and accents come out whole, also when the budget ends inside a character."""
    token_ids = smollm2.tokenizer(text)["input_ids"]
    for n in range(1, len(token_ids) + 1):
        pieces = [token_ids[:n][i : i + width] for i in range(0, n, width)]
        chunks = streamed(smollm2.tokenizer, pieces)
        assert "".join(chunks) == decode_tokens(smollm2.tokenizer, token_ids[:n])
        if "\ufffd" not in text:
            assert not any("\ufffd" in chunk for chunk in chunks[:-1])


@pytest.mark.real_model
def test_smollm2_streams_arbitrary_tokens(smollm2):
    """Random ids, hence invalid UTF-8 most of the time."""

    @given(st.lists(st.lists(st.integers(0, 49151), min_size=1, max_size=6), max_size=6))
    def check(pieces):
        whole = decode_tokens(smollm2.tokenizer, [token_id for piece in pieces for token_id in piece])
        assert "".join(streamed(smollm2.tokenizer, pieces)) == whole

    check()


# Stop strings that hold special tokens


def marked_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with two special tokens: ``<|end|>`` and ``<|go|>``."""
    pieces = ["a", "b", "Ċ", "<|", "end|>"]
    vocab = {"<|end|>": 0, "<|go|>": 1, **{piece: i + 2 for i, piece in enumerate(pieces)}}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|go|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


END, GO, A, B, LINE, OPEN, CLOSE = range(7)


@pytest.mark.parametrize(
    ("token_ids", "stop", "text", "n_tokens"),
    [
        ([A, B, END, A], ["<|end|>"], "ab", 3),
        ([A, LINE, END, A], ["\n<|end|>"], "a", 3),
        ([A, LINE, B, END], ["\n<|end|>"], "a\nb", 4),
        ([A, END, GO, B], ["<|end|><|go|>"], "a", 3),
        ([A, END, A, GO, B], ["<|end|><|go|>"], "aab", 5),
        ([A, B, END, A, B], ["b<|end|>a"], "a", 4),
        ([A, B, END, B, A], ["b<|end|>a"], "abba", 5),
        ([A, END, B], ["b", "<|end|>"], "a", 2),
        ([A, B, END], ["b", "<|end|>"], "a", 2),
        ([A, OPEN, CLOSE, B], ["<|end|>"], "a", 3),
        ([END, A], ["<|end|>"], "", 1),
        ([GO, A, GO, END], ["<|end|>"], "a", 4),
    ],
)
@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_stop_string_may_hold_special_tokens(token_ids, stop, text, n_tokens, width):
    """It ends the output where it is complete, though the text does not show it, and no chunk lets a part of it out."""
    tokenizer = marked_tokenizer()
    pieces = [token_ids[i : i + width] for i in range(0, len(token_ids), width)]
    assert "".join(streamed(tokenizer, pieces, stop)) == text
    stopping = Stopping(100, stop=stop, text=IncrementalText(tokenizer))
    emitted = []
    for piece in pieces:
        emission = stopping.truncate(piece)
        emitted += emission.token_ids
        if emission.finish_reason is not None:
            break
    assert emitted == token_ids[:n_tokens]


def test_special_tokens_show_where_they_are_asked_for():
    """And then a stop string is looked for in what is seen."""
    tokenizer = marked_tokenizer()
    text = IncrementalText(tokenizer, skip_special_tokens=False)
    stopping = Stopping(100, stop=["b<|end|>"], text=text)
    stream = TextStream(text, ["b<|end|>"])
    chunks = []
    for token_id in [GO, A, B, END]:
        emission = stopping.truncate([token_id])
        chunks.append(stream.advance() if emission.finish_reason is None else stream.finish(stopping.text_end))
    assert emission.finish_reason == "stop"
    assert chunks == ["<|go|>", "a", "", ""]


@pytest.mark.real_model
def test_smollm2_stops_at_the_end_of_its_turn_where_a_stop_string_says_so(smollm2):
    """As transformers' ``stop_strings``: the same tokens, without the end-of-turn token as EOS."""
    from quasar.pipeline.pipeline import Pipeline

    pipe = Pipeline.from_model(smollm2.model, smollm2.tokenizer, quantizer="none")
    result = pipe.generate("Say hello.", eos_token_id=None, stop="<|im_end|>", max_new_tokens=40)
    assert result.finish_reason == "stop"
    assert result.token_ids == pipe.generate("Say hello.", max_new_tokens=40).token_ids
    assert "<|im_end|>" not in result.text
    shown = pipe.generate("Say hello.", max_new_tokens=40, skip_special_tokens=False)
    assert shown.text == result.text + "<|im_end|>"
