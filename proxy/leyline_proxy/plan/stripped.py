"""Edits by which a chat template only strips the model's own thinking. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .token_diff import Hunk

Decode = Callable[[Sequence[int]], str]
"""Returns the text of tokens, special ones included."""

_WINDOW = 16
"""Tokens on each side of a hunk in which the marks of a block are looked for."""


class _Marks(NamedTuple):
    """The marks of a block of thinking."""

    opening: str
    closing: str


_MARKS = (
    _Marks("<think>", "</think>"),
    _Marks("<thinking>", "</thinking>"),
    _Marks("◁think▷", "◁/think▷"),
    _Marks("[THINK]", "[/THINK]"),
    _Marks("<seed:think>", "</seed:think>"),
    _Marks("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    _Marks("<|channel|>analysis<|message|>", "<|end|>"),
)
"""DeepSeek, Qwen, GLM, Kimi and MiniMax; Kimi's and Mistral's older forms; Seed; Harmony, whose
next channel has a beginning of its own."""


def strips_thinking(hunk: Hunk, source: array[int], prompt: array[int], decode: Decode) -> bool:
    """Return True if a hunk removes one block of thinking, or its content, and nothing else.

    The hunk may take the block's marks along or leave them, and the prompt may have marks of an
    empty block instead. White space around the marks doesn't count.

    Args:
        hunk: a difference that no message explains.
        source: tokens of the retained turn.
        prompt: tokens of this turn's prompt.
    """
    if hunk.end == hunk.start:
        return False
    added = decode(prompt[hunk.new_start : hunk.new_end])
    for marks in _MARKS:
        added = added.replace(marks.opening, "").replace(marks.closing, "")
    if added.strip():
        return False
    before = decode(source[max(0, hunk.start - _WINDOW) : hunk.start])
    removed = decode(source[hunk.start : hunk.end])
    after = decode(source[hunk.end : hunk.end + _WINDOW])
    text, start, end = before + removed + after, len(before), len(before) + len(removed)
    return any(_is_block(text, start, end, marks) for marks in _MARKS)


def _is_block(text: str, start: int, end: int, marks: _Marks) -> bool:
    """Return True if ``[start, end)`` of a text is a block, but for marks and white space."""
    opened = text.find(marks.opening)
    while opened >= 0:
        inside = opened + len(marks.opening)
        if _adjoins(text, opened, inside, start):
            closed = text.find(marks.closing, inside)
            return closed >= 0 and _adjoins(text, closed, closed + len(marks.closing), end)
        opened = text.find(marks.opening, inside)
    return False


def _adjoins(text: str, left: int, right: int, edge: int) -> bool:
    """Return True if only white space lies between a mark ``[left, right)`` and an edge."""
    return not text[right:edge].strip() and not text[edge:left].strip()
