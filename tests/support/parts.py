"""Checks of the parts that a recallable policy leaves in a list."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from leyline_policies import Message, Policy, approximate_tokens, text_of
from leyline_policies.conversation import INSTRUCTION_ROLES
from leyline_policies.marks import MarkedMessage
from leyline_policies.recall import ADDRESS, Evicted, address_of, evicted_by, stubs_in
from leyline_policies.verbs import is_forgotten


def parts_in(messages: Sequence[Message]) -> dict[str, Evicted]:
    """The parts that messages show, by address."""
    return {part.address: part for message in messages for part in evicted_by(message)}


def check_parts(before: Sequence[Message], after: Sequence[Message], policy: Policy) -> None:
    """Addresses and texts belong together, stubs and parts as well, and nothing is lost."""
    parts, given = parts_in(after), {id(message) for message in before}
    for part in parts.values():
        assert part.address == address_of(part.text)
        assert part.policy == policy.name
        assert part.text
    shown: dict[str, int] = {}
    for message in after:
        if id(message) not in given:
            text = text_of(message)
            assert all(address in parts for address in ADDRESS.findall(text))
            shown |= {stub.address: stub.tokens for stub in stubs_in(text)}
            assert not (stubs_in(text) and message["role"] in {"assistant", *INSTRUCTION_ROLES})
    assert shown == {address: part.tokens for address, part in parts.items()}
    _nothing_is_lost(before, after, parts)
    if parts and not any(map(_has_pictures, before)):  # these go for a stub, whatever it costs
        assert sum(map(approximate_tokens, after)) < sum(map(approximate_tokens, before)) + _own(
            before, after
        )


def _has_pictures(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any("text" not in part for part in content)


def _own(before: Sequence[Message], after: Sequence[Message]) -> int:
    """Tokens that the policy itself adds: notes and messages of its own."""
    given = {id(message) for message in before}
    return sum(
        max(0, approximate_tokens(message) - approximate_tokens(_given(message, given)))
        for message in after
        if id(message) not in given
    )


def _given(message: Message, given: Collection[int]) -> Message:
    """The given message that one was made from; an empty one if it was put in."""
    while isinstance(message, MarkedMessage) and message.origin is not message:
        message = message.origin
        if id(message) in given:
            return message
    return {}


def _nothing_is_lost(
    before: Sequence[Message], after: Sequence[Message], parts: dict[str, Evicted]
) -> None:
    """Each text that was given is sent, in a part or in pieces, unless it is to be forgotten."""
    texts = [text_of(message) for message in after] + [part.text for part in parts.values()]
    for message in after:  # equal pieces are one part
        shown = [parts.get(stub.address) for stub in stubs_in(text_of(message))]
        texts.append("".join(part.text for part in shown if part is not None))
    for message in before:
        if message["role"] in INSTRUCTION_ROLES or is_forgotten(message):
            continue
        content = message.get("content")
        for piece in content if isinstance(content, list) else [content]:
            text = text_of({"content": [piece]})
            assert any(text in each for each in texts), text[:80]
