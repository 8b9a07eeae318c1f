"""Parts: texts that policies evicted from a conversation, and that can be recalled by address.

A policy with the setting ``recallable`` leaves a stub with an address where it evicts text
(`leyline_policies.stubs`). `evicted_by` returns the texts for a store; an agent, a model or a
harness gets one back by the address.
"""

from __future__ import annotations

from collections.abc import Iterator

from leyline_policies.conversation import text_of
from leyline_policies.marks import MarkedMessage
from leyline_policies.policy import Message
from leyline_policies.stubs import ADDRESS, Evicted, Stub, address_of, stubs_in

__all__ = ["ADDRESS", "Evicted", "Stub", "address_of", "evicted_by", "sources_of", "stubs_in"]


def evicted_by(message: Message) -> tuple[Evicted, ...]:
    """Return the parts whose addresses a message shows, from the edits that made it.

    Where one policy evicts what another one shortened, its part holds the other's stub; then the
    other's part is among them. Parts from before a forget are not: they may hold what is forgotten.
    """
    if not isinstance(message, MarkedMessage):
        return ()
    made = {part.address: part for part in _parts_since(message)}
    found: dict[str, Evicted] = {}
    texts = [text_of(message)] if made else []
    while texts:
        for address in ADDRESS.findall(texts.pop()):
            if address in made and address not in found:
                found[address] = made[address]
                texts.append(made[address].text)
    return tuple(found.values())


def sources_of(message: Message) -> tuple[str, ...]:
    """Return the addresses of a message's text, and of what it was before each edit since the last
    forget."""
    texts = dict.fromkeys([text_of(message)])
    while isinstance(message, MarkedMessage) and message.mark.mode != "forget":
        if message.origin is message:
            break
        message = message.origin
        texts[text_of(message)] = None
    return tuple(address_of(text) for text in texts if text)


def _parts_since(message: Message) -> Iterator[Evicted]:
    """Yield the parts of each edit since the last forget, the latest edit's first."""
    while isinstance(message, MarkedMessage) and message.mark.mode != "forget":
        yield from message.mark.evicted
        if message.origin is message:
            return
        message = message.origin
