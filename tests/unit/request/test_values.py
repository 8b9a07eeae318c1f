"""The bound on the JSON values of a body: exact outside of texts, in pieces, before decoding."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.errors import BadRequestError
from leyline_proxy.request.values import MAX_VALUES, check_values, decode, most_values

LIMIT = 1000
HOLD_S = 0.05
SIZE = 8 << 20

documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('a"\\[{,1', max_size=4), inner),
    max_leaves=60,
)


def accepted(raw: bytes, limit: int = LIMIT) -> bool:
    """True if a body of that many values may pass."""
    try:
        for _ in check_values(raw, limit):
            pass
    except BadRequestError as error:
        assert error.code == "too_many_values"
        assert str(limit) in error.message and "max_body_values" in error.message
        return False
    return True


def texts_and_containers(value: Any) -> int:
    """Lists, objects, texts and names of a decoded document."""
    found, rest = 0, [value]
    while rest:
        each = rest.pop()
        if isinstance(each, dict):
            rest += each.values()
            found += 1 + len(each)
        elif isinstance(each, list):
            rest += each
            found += 1
        else:
            found += isinstance(each, str)
    return found


@given(documents, st.booleans())
def test_no_document_with_too_many_values_passes(document: Any, ascii_only: bool) -> None:
    """A body that passes a limit has no more lists, objects, texts and names than that."""
    raw = json.dumps(document, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    held = texts_and_containers(document)
    assert most_values(raw) >= held
    assert not held or not accepted(raw, held - 1)


@pytest.mark.parametrize("unit", ["[", '"', '"[', "\\", "12,", '\\"{,', "é[", '\\\\"],'])
@pytest.mark.parametrize("shift", [0, 1, 2])
def test_what_a_text_contains_is_no_value(unit: str, shift: int) -> None:
    """A text of any length and content counts once, wherever the pieces of the count end."""
    whole = json.dumps(["a" * shift, unit * (1 << 18), unit], ensure_ascii=False).encode()
    assert accepted(whole, 10)
    assert not accepted(whole[:-1] + b',"a"' * 10 + b"]", 10)


def test_a_prompt_of_token_ids_passes() -> None:
    """A million token ids are accepted by default; as many other numbers aren't."""
    assert accepted(json.dumps({"prompt": [12345] * 1_000_000}).encode(), MAX_VALUES)
    assert not accepted(json.dumps({"prompt": [1.5] * 1_000_000}).encode(), MAX_VALUES)


def test_a_long_conversation_passes() -> None:
    """10,000 messages of an agent, half of them with tool calls, are accepted by default."""
    function = {"name": "f", "arguments": "{}"}
    call = {"id": "c", "type": "function", "function": function}
    rounds = [
        {"role": "assistant", "content": "x", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "[{" * 100},
    ]
    assert accepted(json.dumps({"messages": rounds * 5000}).encode(), MAX_VALUES)


UNITS = {
    "lists": lambda _: b"[]",
    "objects": lambda _: b'{"a":[]}',
    "names": lambda number: b'{"k%d":0}' % number,
    "texts": lambda _: b'"ab"',
    "ids": lambda _: b"12345",
    "exponents": lambda _: b"1e300",
    "tiny": lambda _: b"9e-324",
    "between": lambda _: b"9007199254740993.00000000000000000000000001",
    "long": lambda _: b"1" * 4300,
    "literals": lambda _: b"null",
}


@pytest.mark.parametrize("kind", UNITS)
def test_what_is_accepted_is_decoded_soon(kind: str) -> None:
    """The largest accepted list of any one kind is decoded, and counted piece by piece, within a
    bounded CPU time."""
    units = [UNITS[kind](number) for number in range(SIZE // (len(UNITS[kind](0)) + 1))]
    most, least = len(units), 0
    while most - least > most // 16:
        middle = (most + least) // 2
        if accepted(b"[" + b",".join(units[:middle]) + b"]", MAX_VALUES):
            least = middle
        else:
            most = middle
    raw = b"[" + b",".join(units[:least]) + b"]"
    # Other processes' caches and collections of this one make single runs slower, never faster.
    assert min(_decoding_s(raw) for _ in range(3)) < 2 * HOLD_S
    assert min(_longest_piece_s(raw) for _ in range(3)) < HOLD_S


def _decoding_s(raw: bytes) -> float:
    started = time.thread_time()
    decode(raw)
    return time.thread_time() - started


def _longest_piece_s(raw: bytes) -> float:
    longest, started = 0.0, time.thread_time()
    for _ in check_values(raw, MAX_VALUES):
        longest = max(longest, time.thread_time() - started)
        started = time.thread_time()
    return longest


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers())
def test_numbers_are_what_other_decoders_read(number: float) -> None:
    """Floats and integers are decoded as the JSON library would."""
    raw = repr(number).encode()
    try:
        expected = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        with pytest.raises(msgspec.DecodeError):
            decode(raw)
        return
    assert decode(raw) == expected and type(decode(raw)) is type(expected)


@pytest.mark.parametrize("raw", [b"1e400", b"[-1e999]", b'{"a":1E400}'])
def test_a_number_that_no_float_holds_is_refused(raw: bytes) -> None:
    """Infinity never comes out of JSON."""
    with pytest.raises(msgspec.DecodeError, match="out of range"):
        decode(raw)
