"""Hunks that strip one block of thinking, told from those that do anything else."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_proxy.plan.stripped import strips_thinking
from leyline_proxy.plan.token_diff import Hunk


def decode(tokens: Sequence[int]) -> str:
    """The text of tokens that are characters, or marks of several."""
    return "".join(MARKS[token] if token in MARKS else chr(token) for token in tokens)


MARKS = {
    -1: "<think>",
    -2: "</think>",
    -3: "<|channel|>analysis<|message|>",
    -4: "<|end|>",
    -5: "<|start|>assistant",
    -6: "<|channel|>final<|message|>",
    -7: "[THINK]",
    -8: "[/THINK]",
}


def encode(text: str) -> array[int]:
    """Tokens of a text: its marks, and else its characters."""
    tokens = array("q")
    while text:
        mark = next((number for number, mark in MARKS.items() if text.startswith(mark)), None)
        tokens.append(ord(text[0]) if mark is None else mark)
        text = text[len(MARKS.get(tokens[-1], "x")) :]
    return tokens


def stripped(before: str, removed: str, after: str, added: str = "") -> bool:
    """Ask about a hunk by the texts around it."""
    source = encode(before) + encode(removed) + encode(after)
    prompt = encode(before) + encode(added) + encode(after)
    start, new = len(encode(before)), len(encode(before))
    hunk = Hunk(start, start + len(encode(removed)), new, new + len(encode(added)))
    return strips_thinking(hunk, source, prompt, decode)


LONG = "So it is file 3. " * 40


@pytest.mark.parametrize(
    ("before", "removed", "after", "added"),
    [
        ("<user>Go.<assistant>", f"<think>\n{LONG}\n</think>\n\n", "It is file 3.", ""),
        ("<assistant>\n<think>", LONG, "</think>\nIt is file 3.", ""),
        ("<assistant>\n<think>\n", f"{LONG}\n</think>", "\n\nIt is file 3.", ""),
        ("<assistant>", f"\n<think>{LONG}</think>", "\nIt is file 3.", "\n<think></think>"),
        ("<assistant>", f"<think>{LONG}</think>", "<tool_call>", "</think>"),
        ("<assistant>[THINK]", LONG, "[/THINK]It is file 3.", ""),
        (
            "<|start|>assistant",
            f"<|channel|>analysis<|message|>{LONG}<|end|><|start|>assistant",
            "<|channel|>final<|message|>It is file 3.",
            "",
        ),
        ("<think></think>One.<assistant>", f"<think>{LONG}</think>", "It is file 3.", ""),
    ],
)
def test_a_stripped_block_is_found(before: str, removed: str, after: str, added: str) -> None:
    """With or without its marks, in each form that models use."""
    assert stripped(before, removed, after, added)


@pytest.mark.parametrize(
    ("before", "removed", "after", "added"),
    [
        ("<assistant>", "I look at file 3. ", "It is file 3.", ""),
        ("<assistant>", f"<think>{LONG}</think>It is ", "file 3.", ""),
        ("<assistant>Then: ", f"so <think>{LONG}</think>", "file 3.", ""),
        ("<assistant>", f"<think>{LONG}", "and so on.</think>It is file 3.", ""),
        ("<assistant><think>First, ", LONG, "</think>It is file 3.", ""),
        ("<assistant>", f"<think>{LONG}</think>", "It is file 3.", "No."),
        ("<assistant>", f"<think>{LONG}</think>", "It is file 3.", "<think>a</think>"),
        ("<assistant>", f"<think>{LONG}", "It was cut", ""),
        ("<think>One</think>", "It is file 3.", "<think>Two</think>", ""),
        ("<assistant>", f"<think>{LONG}</think>Yes.<think>{LONG}</think>", "It is.", ""),
        ("<assistant>", "", "It is file 3.", ""),
        ("<assistant>[THINK]", LONG, "</think>It is file 3.", ""),
    ],
)
def test_anything_else_is_not(before: str, removed: str, after: str, added: str) -> None:
    """Spoken text, parts of a block, two blocks, a block that doesn't end, and other text."""
    assert not stripped(before, removed, after, added)


WORDS = st.text(st.sampled_from("ab \n.<"), max_size=30)


@given(said=WORDS.filter(str.strip), thought=WORDS, before=WORDS, after=WORDS)
def test_what_was_said_is_never_taken_for_thinking(
    said: str, thought: str, before: str, after: str
) -> None:
    """Whatever surrounds it, a hunk with text outside of the block isn't stripped thinking."""
    block = f"<think>{thought}</think>"
    assert not stripped(before, said + block, after)
    assert not stripped(before, block + said, after)
    assert not stripped(f"{before}{block}", said, after)
    assert stripped(before, block, after) or not block
