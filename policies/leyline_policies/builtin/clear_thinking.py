"""The policy that removes old thinking from the history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from leyline_policies.context import Context
from leyline_policies.marks import edit
from leyline_policies.policy import Message, Mode

_MEMBERS = ("reasoning_content", "reasoning", "reasoning_details", "thinking", "thinking_blocks")
_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
_OPEN, _CLOSE = "<think>", "</think>"
_ALL = "all"


@dataclass(frozen=True, slots=True)
class ClearThinking:
    """Remove the thinking of all but the newest ``keep`` turns that hold any; "all" keeps it all.

    A turn is everything that the assistant says between two messages of the user, calls of tools
    and what follows their results included: the rule of Anthropic's ``clear_thinking_20251015``,
    as its public documentation states it. With ``unit="message"`` each assistant message counts
    for itself, which also thins out a long run of an agent without interruption. Thinking is in
    the members and content parts that OpenAI-compatible servers use for it; with ``think_tags``
    also in the text, as ``<think>…</think>``.
    """

    name: ClassVar[str] = "clear_thinking"
    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    keep: str = "1"
    unit: Literal["turn", "message"] = "turn"
    think_tags: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError if ``keep`` is neither a number of turns nor "all"."""
        object.__setattr__(self, "keep", str(self.keep))
        if self.keep != _ALL and not (self.keep.isascii() and self.keep.isdigit()):
            raise ValueError(f"keep={self.keep} must be 0, a number of turns or all")
        if self.unit not in ("turn", "message"):
            raise ValueError(f"unit={self.unit} must be turn or message")

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages without the older thinking."""
        if self.keep == _ALL:
            return messages
        left = int(self.keep)
        edited: list[Message] | None = None
        counted = False  # True if this turn is one of those that are kept
        each_cleared = context.each(messages, self._cleared)
        if each_cleared == messages:
            return messages
        for index in range(len(messages) - 1, -1, -1):
            message = messages[index]
            role = message.get("role")
            if role == "user":
                counted = False
            elif role == "assistant":
                cleared = each_cleared[index]
                if cleared is message:
                    continue
                if left > 0 or counted:
                    left -= not counted
                    counted = self.unit == "turn"
                    continue
                edited = list(messages) if edited is None else edited
                edited[index] = cleared
        return messages if edited is None else edited

    def _cleared(self, message: Message) -> Message:
        if message.get("role") != "assistant":
            return message
        without = [key for key in _MEMBERS if message.get(key)]
        content = message.get("content")
        cleared = self._content(content)
        if cleared is content:
            return edit(message, without=without, cause="thinking") if without else message
        return edit(message, without=without, cause="thinking", content=cleared)

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            return self._text(content)
        if not isinstance(content, list):
            return content
        parts = [self._part(part) for part in content if not _is_thinking(part)]
        if len(parts) == len(content) and all(a is b for a, b in zip(parts, content, strict=True)):
            return content
        return parts or ""  # servers refuse an empty list

    def _part(self, part: Any) -> Any:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            return part
        text = self._text(part["text"])
        return part if text is part["text"] else {**part, "text": text}

    def _text(self, text: str) -> str:
        return without_think_tags(text) if self.think_tags and _CLOSE in text else text


def without_think_tags(text: str) -> str:
    """Return ``text`` without ``<think>…</think>`` and the blank lines after it.

    Thinking that begins the text needs no opening tag: templates that put it into the prompt leave
    only the closing one. Thinking that is never closed stays.
    """
    kept: list[str] = []
    at = 0
    close = text.find(_CLOSE)
    if close >= 0 and not 0 <= text.find(_OPEN) < close:
        at = _behind(text, close)
    while True:
        start = text.find(_OPEN, at)
        close = text.find(_CLOSE, start) if start >= 0 else -1
        if close < 0:
            kept.append(text[at:])
            return "".join(kept)
        kept.append(text[at:start])
        at = _behind(text, close)


def _behind(text: str, close: int) -> int:
    at = close + len(_CLOSE)
    while at < len(text) and text[at] == "\n":
        at += 1
    return at


def _is_thinking(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in _PARTS
