"""Stop strings, detokenisation and tool calls, whatever the pieces that text arrives in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_replay.text.detokenizer import IncrementalDetokenizer
from leyline_replay.text.stops import StopMatcher
from leyline_replay.text.tool_calls import ToolCallParser, parse_tool_call

TEXT = st.text(alphabet="ab<\n", max_size=30)


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    """``text`` cut at the given positions."""
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


def run_matcher(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, bool]:
    """The text that a matcher lets through, and if it stopped."""
    matcher = StopMatcher(stops)
    sent = ""
    for piece in pieces:
        result = matcher.feed(piece)
        sent += result.text
        if result.stopped:
            return sent, True
    return sent + matcher.flush(), False


@given(
    TEXT, st.lists(st.integers(0, 30)), st.lists(st.text(alphabet="ab<\n", min_size=1), max_size=3)
)
def test_stop_result_does_not_depend_on_the_cuts(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    """The same text in other pieces ends at the same place and never shows a stop string."""
    sent, stopped = run_matcher(pieces_of(text, cuts), stops)
    assert (sent, stopped) == run_matcher(list(text), stops)
    assert stopped == any(stop in text for stop in stops)
    assert text.startswith(sent)
    assert not any(stop in sent for stop in stops)
    if not stopped:
        assert sent == text


def test_partial_stop_is_held_back_and_released() -> None:
    """Text that begins like a stop string waits until it can't be one any more."""
    matcher = StopMatcher(["STOP"])
    assert matcher.feed("hi ST").text == "hi "
    assert matcher.feed("AR").text == "STAR"
    assert matcher.feed("S").text == ""
    assert matcher.flush() == "S"


def byte_decoder(tokens: list[int]) -> str:
    """A tokenizer with one token per byte."""
    return bytes(tokens).decode("utf-8", errors="replace")


@given(st.text())
def test_detokenizer_never_emits_half_a_character(text: str) -> None:
    """Every emitted piece consists of whole characters of the text."""
    detokenizer = IncrementalDetokenizer(byte_decoder)
    sent = ""
    for byte in text.encode():
        sent += detokenizer.feed(byte)
        assert text.startswith(sent)
    assert sent + detokenizer.flush() == text


@given(st.binary())
def test_detokenizer_agrees_with_decoding_at_once(data: bytes) -> None:
    """Bytes that are no UTF-8 come out as they do when everything is decoded at once."""
    detokenizer = IncrementalDetokenizer(byte_decoder)
    sent = "".join(detokenizer.feed(byte) for byte in data) + detokenizer.flush()
    assert sent == data.decode("utf-8", errors="replace")


def run_parser(pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Text and (name, arguments) of what a parser made of the pieces."""
    parser = ToolCallParser()
    outputs = [parser.feed(piece) for piece in pieces]
    text = "".join(output.text for output in outputs) + parser.flush()
    return text, [(call.name, call.arguments) for output in outputs for call in output.calls]


ANSWER = (
    'Look:\n<tool_call>\n{"name": "ls", "arguments": {"path":  "."}}\n</tool_call>'
    '\n<tool_call>\n{"name": "cat", "arguments": {}}\n</tool_call>'
)


@given(st.lists(st.integers(0, len(ANSWER))))
def test_tool_calls_are_found_across_pieces(cuts: list[int]) -> None:
    """Content, names and verbatim arguments don't depend on how the answer was cut."""
    expected = ("Look:", [("ls", '{"path":  "."}'), ("cat", "{}")])
    assert run_parser(pieces_of(ANSWER, cuts)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nnot json\n</tool_call>",
        "a\n<tool_call>\n{",
        "a < b <tool",
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>[]</tool_call>",
        "\n\n",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    """Broken, unclosed and near-miss blocks are content, unchanged."""
    assert run_parser(list(text)) == (text, [])


@given(
    st.dictionaries(st.text(max_size=5), st.one_of(st.text(), st.integers(), st.none())),
    st.text(min_size=1, max_size=8),
)
def test_arguments_survive_any_json(arguments: dict[str, object], name: str) -> None:
    """The caller decodes exactly the object that the model wrote."""
    call = parse_tool_call(json.dumps({"name": name, "arguments": arguments}))
    assert call is not None
    assert (call.name, json.loads(call.arguments)) == (name, arguments)
