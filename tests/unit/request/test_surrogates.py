"""Halves of surrogate pairs: U+FFFD takes their place in a body, and nothing else changes."""

from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from leyline_proxy.request.surrogates import PIECE, repair_surrogates
from leyline_proxy.request.values import decode

HALVES = re.compile("[\ud800-\udfff]")
PAIRS = ("\\ud83d", "\\uDE00", "\\udBff\\uDC00")
words = st.sampled_from((*PAIRS, "\\\\", "ud83d", "\\n", '\\"', "\\u0041", "é", "a", "😀"))
texts = st.lists(words, max_size=40).map("".join)
members = st.lists(st.tuples(texts, texts), max_size=3)


def written(pairs: list[tuple[str, str]]) -> str:
    """An object of lists, as JSON."""
    each = (f'"{n}:{name}":["{text}"]' for n, (name, text) in enumerate(pairs))
    return "{" + ",".join(each) + "}"


def repaired(raw: bytes, piece: int = PIECE) -> bytes:
    """The bytes after all steps."""
    steps = repair_surrogates(raw, piece)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return bytes(end.value)


def replaced(value: Any) -> Any:
    """A document of Python's json, with U+FFFD for what is no text."""
    if isinstance(value, str):
        return HALVES.sub("\ufffd", value)
    if isinstance(value, list):
        return [replaced(each) for each in value]
    return {replaced(name): replaced(each) for name, each in value.items()}


@given(members.map(written), st.integers(13, 40))
@example('{"\\\\ud83d\\ude00":["\\ud83d\\ud83d\\ude00\\ude00"]}', 13)
@example('{"aaaa":["\\ud83d\\ude00"]}', 16)
def test_texts_are_those_of_pythons_json_with_halves_replaced(raw: str, piece: int) -> None:
    """In every text and name, wherever the pieces end; all other bytes keep their places."""
    given_bytes = raw.encode()
    out = repaired(given_bytes, piece)
    assert decode(out) == replaced(json.loads(raw))
    assert len(out) == len(given_bytes)
    assert [a for a, b in zip(out, given_bytes, strict=True) if a != b].count(ord("\\")) == 0
    assert repaired(out, piece) == out == repaired(given_bytes)


@given(st.binary(max_size=200) | texts.map(str.encode), st.integers(13, 40))
def test_what_is_no_json_doesnt_become_json(raw: bytes, piece: int) -> None:
    """Bytes change only where an escape stands, and never their number."""
    out = repaired(raw, piece)
    assert len(out) == len(raw)
    if b"\\u" not in raw or b"\0" in raw:
        assert out == raw


def test_no_step_takes_more_than_a_piece() -> None:
    """The steps of a body are as many as its pieces, whatever it holds."""
    for word in (b"\\\\", b"\\ud83d", b"\\ud83d\\ude00", b"a"):
        raw = b'"' + word * (8 * PIECE // len(word)) + b'"'
        assert sum(1 for _ in repair_surrogates(raw)) in (8, 9)
