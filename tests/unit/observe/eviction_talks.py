"""Conversations of which policies evict texts, without a proxy."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from leyline_policies.recall import Evicted, address_of
from leyline_proxy.model.prepared import Prepared, SentMessage

Message = dict[str, Any]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def block(number: int) -> str:
    """A run of 24 characters that no other number has."""
    return "".join(random.Random(number).choices(_LETTERS, k=23)) + "."


def text_with(*blocks: int) -> str:
    """A text of several blocks."""
    return " ".join(map(block, blocks))


def evicted(text: str, tokens: int = 0, policy: str = "cut") -> Evicted:
    """The part of a text."""
    return Evicted(address_of(text), text, "tool", "cat", tokens or len(text) // 4, policy)


@dataclass
class Talk:
    """A conversation whose client sends everything, turn by turn."""

    messages: list[Message] = field(default_factory=lambda: [{"role": "user", "content": "Go."}])

    def result(self, text: str) -> None:
        """Add a tool's result."""
        self.messages.append({"role": "tool", "content": text})

    def answer(self, text: str) -> None:
        """Add the model's answer to the turn before."""
        self.messages.append({"role": "assistant", "content": text})

    def turn(self, gone: Sequence[Evicted] = (), *, shown: Collection[str] = ()) -> Prepared:
        """A turn whose policies have evicted these texts, wherever they are.

        Args:
            shown: addresses of those that stay in the prompt all the same.
        """
        stubs = {each.text: each.stub for each in gone if each.address not in shown}
        sent = tuple(
            SentMessage({**m, "content": stubs.get(m["content"], m["content"])}, at)
            for at, m in enumerate(self.messages)
        )
        return Prepared(tuple(self.messages), sent, evicted=tuple(gone))
