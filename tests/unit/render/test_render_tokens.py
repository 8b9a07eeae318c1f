"""Tokenising by pieces: equal to tokenising the whole, and bounded."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokens_kit import check_places, texts, tokenizer_json

from leyline_proxy.render.tokens import PieceTokenizer


@given(texts, texts)
def test_pieces_give_the_tokens_of_the_whole(first: str, second: str) -> None:
    """Ids, and the token at every character, are the plain tokenizer's, also from memory."""
    pieces = PieceTokenizer(tokenizer_json())
    plain = Tokenizer.from_str(tokenizer_json())
    assert pieces.remembers
    for text in (first, first + second, second, first):
        encoded = pieces.encode(text)
        expected = plain.encode(text, add_special_tokens=False)
        assert encoded.ids.tolist() == expected.ids
        check_places(encoded, text, [start for start, _ in expected.offsets])


@given(st.lists(texts | st.text("<|im_start>", max_size=6), max_size=6), st.integers(0, 5))
def test_joined_texts_have_the_tokens_of_the_whole(parts: list[str], again: int) -> None:
    """This holds where a special token begins in one text and ends in another, or in a third,
    too."""
    pieces = PieceTokenizer(tokenizer_json())
    plain = Tokenizer.from_str(tokenizer_json())
    for order in (parts, parts[again:] + parts[:again], parts):
        text = "".join(order)
        expected = plain.encode(text, add_special_tokens=False)
        encoded = pieces.join(order)
        assert encoded.ids.tolist() == expected.ids
        check_places(encoded, text, [start for start, _ in expected.offsets])


def test_a_split_special_token_is_one_token() -> None:
    """The control of the property above: its texts do cut special tokens in two."""
    pieces = PieceTokenizer(tokenizer_json())
    whole = pieces.encode("a<|im_end|>b").ids
    assert pieces.join(["a<|im", "_e", "nd|>b"]).ids == whole
    apart = [token for part in ("a<|im", "_e", "nd|>b") for token in pieces.encode(part).ids]
    assert apart != whole.tolist()


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_tokenizers_whose_pieces_depend_on_each_other(flag: str) -> None:
    """If special tokens look at their neighbours, the text is tokenised as a whole."""
    document = tokenizer_json(**{flag: True})
    pieces = PieceTokenizer(document)
    plain = Tokenizer.from_str(document)
    assert not pieces.remembers
    text = "a <|im_end|> b<|im_start|>\n c"
    expected = plain.encode(text, add_special_tokens=False).ids
    assert pieces.encode(text).ids.tolist() == expected
    assert pieces.join([text[:6], text[6:]]).ids.tolist() == expected


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}},
        {"normalizer": {"type": "Prepend", "prepend": "_"}},
    ],
    ids=["prefix space", "prepend"],
)
def test_steps_that_know_the_beginning(change: dict[str, object]) -> None:
    """A step that treats the beginning of a text differently forbids pieces."""
    document = json.loads(tokenizer_json()) | change
    assert not PieceTokenizer(json.dumps(document)).remembers


def test_memory_is_bounded() -> None:
    """Beyond the bound the least recently used pieces go, and the tokens stay right."""
    pieces = PieceTokenizer(tokenizer_json(), max_remembered_chars=100)
    plain = Tokenizer.from_str(tokenizer_json())
    for number in range(200):
        text = f"<|im_start|>piece number {number}<|im_end|>"
        assert pieces.encode(text).ids.tolist() == plain.encode(text).ids
        assert pieces.join([text, text]).ids.tolist() == plain.encode(text + text).ids
    assert pieces.remembered_chars <= 100


@given(texts, st.integers(1, 3))
def test_long_texts_have_the_tokens_of_short_ones(text: str, times: int) -> None:
    """A text long enough to be tokenised beside other threads has the plain tokenizer's ids and
    places."""
    part = text.replace("<", "") * times + "naïve 漢字 🙂 fox " * 200
    encoded = PieceTokenizer(tokenizer_json()).encode(part)
    expected = Tokenizer.from_str(tokenizer_json()).encode(part, add_special_tokens=False)
    assert encoded.ids.tolist() == expected.ids
    starts = [start for start, _ in expected.offsets]
    assert encoded.tokens_at(starts) == [starts.index(start) for start in starts]


def longest_share(work: Callable[[], object]) -> float:
    """The longest time without a chance for this thread, as a part of the work's CPU time."""
    gaps, begun = [0.0], time.process_time()
    thread, last = threading.Thread(target=work), begun
    thread.start()
    while thread.is_alive():
        now = time.process_time()
        gaps.append(now - last)
        last = now
        time.sleep(0.001)
    gaps.append(time.process_time() - last)
    return max(gaps) / (last - begun)


def test_other_threads_run_while_a_long_text_is_tokenised() -> None:
    """Tokenising one long text never holds the interpreter for most of its time; the plain call,
    which does, is the control."""
    text = "the quick brown fox, naïve café 漢字 " * 8000
    plain = Tokenizer.from_str(tokenizer_json())
    held = max(longest_share(lambda: plain.encode(text)) for _ in range(3))
    pieces = [PieceTokenizer(tokenizer_json()) for _ in range(5)]
    shares = [longest_share(partial(each.encode, text)) for each in pieces]
    assert held > 0.8
    assert min(shares) < 0.4, shares
