"""The policies that shorten results: each chooses places, and says how one message gets shorter.

Everything else is shared: what a turn computes again, which messages stay the same objects, and the
marks of an edit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar

from leyline_policies.builtin.tool_results import result_stub, tool_names
from leyline_policies.context import Context
from leyline_policies.policy import Message, Mode


class ShorterResults(ABC):
    """Shortens the messages at some places, each for itself."""

    __slots__ = ()

    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    def transform(
        self, messages: list[Message], turn_idx: int, context: Context | None = None
    ) -> list[Message]:
        """Return the messages with those at the chosen places shortened."""
        context = context or Context()
        places = self._places(messages, context)
        return context.edited(messages, self._shorter, places) if places else messages

    @abstractmethod
    def _places(self, messages: list[Message], context: Context) -> Sequence[int]:
        """Return the places to shorten, oldest first."""

    @abstractmethod
    def _shorter(self, message: Message) -> Message:
        """Return the shortened message; the given one if it can't get shorter."""


class ClearedResults(ShorterResults):
    """Replaces the content of the results at some places by ``placeholder``."""

    __slots__ = ()

    cause: ClassVar[str | None] = None
    """Cause in the mark of each edit."""

    @property
    @abstractmethod
    def placeholder(self) -> str:
        """The text that a cleared result has instead of its own."""

    def _shorter(self, message: Message) -> Message:
        return result_stub(message, self.placeholder, self.cause)


def of_tools(
    found: Sequence[int],
    messages: list[Message],
    context: Context,
    *,
    tools: Collection[str] | None = None,
    exclude: Collection[str] = (),
) -> Sequence[int]:
    """Return those of the results ``found`` that are of ``tools`` (None: all), not of ``exclude``.

    Reads the names of tools, which cost more than places, only if one of the two limits them.
    """
    if tools is None and not exclude:
        return found
    names = tool_names(messages, context)
    return [
        place
        for place in found
        if (tools is None or names[place] in tools) and names[place] not in exclude
    ]


def check_head_and_tail(head_chars: int, tail_chars: int, key: str, most: int) -> None:
    """Raise ValueError if head and tail are together more than the setting ``key``."""
    if head_chars + tail_chars > most:
        raise ValueError(
            f"head_chars={head_chars} and tail_chars={tail_chars} are together more "
            f"than {key}={most}; they must fit into it"
        )
