"""Policies made of functions, and a talk for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from leyline_policies import Context
from leyline_proxy.edits.prepare import PolicySession, prepare
from leyline_proxy.model.messages import Message
from leyline_proxy.model.prepared import Prepared

FUNCTION = {"name": "f", "arguments": '{"key": "hunter2"}'}
CALL = {"id": "c", "type": "function", "function": FUNCTION}
TALK: list[Message] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "name": "first", "content": "a question"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "a long result"},
    {"role": "assistant", "content": "an answer"},
    {"role": "user", "content": "the last question"},
]

Transform = Callable[[list[Message], Context], Any]


class Plugin:
    """A policy made of a function."""

    def __init__(
        self,
        function: Transform,
        name: str = "plugin",
        *,
        mode: str = "amortize",
        trusted: bool = False,
    ) -> None:
        self.name, self.mode, self.trusted, self._function = name, mode, trusted, function

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> Any:
        return self._function(messages, context)


def at(index: int, change: Callable[[Message], Message]) -> Transform:
    """A transform of one message."""
    return lambda messages, _: [*messages[:index], change(messages[index]), *messages[index + 1 :]]


def run(*policies: Any, client: Any = TALK, session: PolicySession | None = None) -> Prepared:
    """One turn."""
    return prepare(client, policies, (), 3, session=session)


def said(index: int, **verbs: Any) -> list[Message]:
    """The talk with something said of one message."""
    return [m | {"leyline": verbs} if i == index else m for i, m in enumerate(TALK)]
