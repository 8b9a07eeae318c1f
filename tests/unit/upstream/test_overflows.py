"""Engines' words for a prompt that is too long."""

from __future__ import annotations

import json

import pytest
from support.overflow_words import ENGINES, OTHERS, Words

from leyline_proxy.http.refusal import overflow_in, refusal_of_answer, refusal_of_event
from leyline_proxy.overflow import Overflow
from leyline_proxy.upstream.overflows import overflow_of


@pytest.mark.parametrize("words", ENGINES, ids=[each.who for each in ENGINES])
def test_the_figures_are_found(words: Words) -> None:
    """Every engine's refusal is the same error, with all figures that it has."""
    error = overflow_in(words.status, words.raw)
    assert error is not None
    assert (error.status, error.kind) == (400, "invalid_request_error")
    assert error.code == "context_length_exceeded"
    overflow = error.overflow
    assert overflow is not None
    found = (overflow.prompt, overflow.limit, overflow.answer)
    assert found == (words.prompt, words.limit, words.answer)


@pytest.mark.parametrize("words", OTHERS, ids=[each.who for each in OTHERS])
def test_other_refusals_keep_their_words(words: Words) -> None:
    """A limit that a shorter prompt doesn't help against stays what it is."""
    assert overflow_in(words.status, words.raw) is None
    assert refusal_of_answer(words.status, words.raw).code != "context_length_exceeded"


def test_an_error_event_is_read_alike() -> None:
    """An error in a stream has no HTTP status, or has it as its code."""
    message = "The input (5000 tokens) is longer than the model's context length (4096 tokens)."
    for code in (400, "400", None):
        error = refusal_of_event({"message": message, "type": "BadRequestError", "code": code})
        assert (error.status, error.code) == (400, "context_length_exceeded")
    assert refusal_of_event({"message": message, "code": 429}).code == "upstream_error"


@pytest.mark.parametrize(
    ("detail", "reason"),
    [
        ("Model is loading", "Model is loading"),
        (
            [
                {"loc": ["body", "tools", 0], "msg": "Field required", "input": "secret"},
                {"msg": "No."},
            ],
            "tools.0: Field required; No.",
        ),
        ([], "The engine answered with status 422."),
        ({"error": {"message": "inside"}}, "inside"),
    ],
)
def test_a_detail_keeps_its_reason(detail: object, reason: str) -> None:
    """FastAPI's text, list or object is the reason, without what the request had there."""
    error = refusal_of_answer(422, json.dumps({"detail": detail}).encode())
    assert (error.status, error.message) == (422, reason)


def test_only_the_beginning_of_a_reason_is_searched() -> None:
    """A reason of any length costs the same: patterns see 4 KB of it."""
    words = "prompt is too long: 9 tokens > 8"
    assert overflow_of(400, " " * 4000 + words) is not None
    assert overflow_of(400, " " * 5000 + words) is None


@pytest.mark.parametrize(
    ("told", "prompt", "expected"),
    [
        (Overflow(4097, 4096), 9000, Overflow(9000, 4096)),
        (Overflow(3997, 4096, 100), 4050, Overflow(4050, 4096, 100)),
        (Overflow(3997, 4096, 100), 9000, Overflow(9000, 4096)),
        (Overflow(None, 4096), 9000, Overflow(9000, 4096)),
        (Overflow(None, 4096), 9, Overflow(None, 4096)),
        (Overflow(5000, 4096), 4990, Overflow(5000, 4096)),
        (Overflow(5000, 4096), 0, Overflow(5000, 4096)),
    ],
)
def test_a_count_completes_figures(told: Overflow, prompt: int, expected: Overflow) -> None:
    """It counts if it is larger than the engine's, and if the prompt is then what doesn't fit."""
    assert told.counted(prompt) == expected
