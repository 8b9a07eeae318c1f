"""Addresses, stubs, and the parts that a message shows."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyline_policies import Message, edit
from leyline_policies.marks import Mark, MarkedMessage, remark
from leyline_policies.recall import ADDRESS, Evicted, Stub, address_of, evicted_by, stubs_in


def part_of(text: str, tool: str = "bash", role: str = "tool", messages: int = 1) -> Evicted:
    """A part of 2,314 tokens."""
    return Evicted(address_of(text), text, role, tool, 2314, "p", messages=messages)


def showing(message: Message, part: Evicted, mode: str | None = None) -> Message:
    """An edit of a message that shows a part's stub."""
    mark = Mark("forget" if mode else None, evicted=(part,))
    return MarkedMessage({**message, "content": f"cut\n{part.stub}"}, message, mark)


def test_an_address_is_half_a_sha256() -> None:
    """It is that of the text in UTF-8; a lone surrogate has one, too."""
    digest = hashlib.sha256("größer".encode()).hexdigest()
    assert address_of("größer") == f"sha256:{digest[:32]}"
    assert ADDRESS.fullmatch(address_of("\ud800"))


@pytest.mark.parametrize(
    ("part", "what"),
    [
        (part_of("x"), "bash output"),
        (part_of("x", tool="a]\n[b"), "a_b output"),
        (part_of("x", tool="t" * 99), f"{'t' * 64} output"),
        (part_of("x", tool=""), "tool output"),
        (part_of("x", role="function"), "bash output"),
        (part_of("x", role="user"), "user message"),
        (part_of("x", role="assistant"), "assistant message"),
        (part_of("x", role="developer"), "system message"),
        (part_of("x", role="", messages=1_200), "1,200 messages"),
    ],
)
def test_a_stub_says_what_is_gone(part: Evicted, what: str) -> None:
    """It is one line, whatever a tool is called, and is read again."""
    assert part.stub == f"[evicted: {what}, 2,314 tokens, {part.address}]"
    assert stubs_in(f"a\n{part.stub}\nb") == (Stub(what, 2314, part.address),)


@given(st.text(max_size=40))
def test_stubs_are_found_whatever_a_tool_is_called(tool: str) -> None:
    """No name breaks the line, its brackets or the way back to the address."""
    stub = part_of("x", tool=tool).stub
    assert "\n" not in stub
    assert stub.count("[") == stub.count("]") == 1
    assert [each.address for each in stubs_in(stub * 2)] == [address_of("x")] * 2


def test_a_longer_digest_is_no_address() -> None:
    """An image's SHA-256 and an address with more after it aren't taken for one."""
    address = address_of("x")
    assert ADDRESS.findall(
        f"({address}), {address}. {address}0 {address}{'a' * 32} x{address}"
    ) == [
        address,
        address,
    ]
    assert stubs_in(f"[evicted: bash output, 1 tokens, {address}0]") == ()


def test_a_message_shows_the_parts_of_its_edits() -> None:
    """A part counts while its address can be read: in the message, or in a part that can."""
    message: Message = {"role": "tool", "tool_call_id": "c", "content": "long text"}
    first = showing(message, inner := part_of("long text"))
    assert evicted_by(first) == (inner,)
    outer = part_of(first["content"])
    assert evicted_by(showing(first, outer)) == (outer, inner)
    assert evicted_by(edit(first, content="nothing")) == ()
    assert evicted_by(message) == evicted_by(dict(first)) == ()


def test_what_is_forgotten_has_no_parts() -> None:
    """A forget hides the parts of all edits before it, and of itself, but not of those after it."""
    message: Message = {"role": "tool", "tool_call_id": "c", "content": "a secret, long text"}
    first = showing(message, part_of("a secret, long text"))
    assert evicted_by(remark(first, message, "forget")) == ()
    forgotten = edit(first, mode="forget", content=f"a [gone]\n{part_of('a secret').stub}")
    assert evicted_by(forgotten) == ()
    later = part_of("a [gone]")
    assert evicted_by(showing(forgotten, later)) == (later,)


def test_a_part_shows_no_text_when_printed() -> None:
    """Neither it nor the mark that holds it puts text into a log."""
    assert "secret" not in repr(part_of("a secret"))
    assert "secret" not in repr(Mark(evicted=(part_of("a secret"),)))
