"""The policy that keeps oversized tool results outside the prompt, under addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from leyline_policies.builtin.old_results import of_tools
from leyline_policies.builtin.tool_results import (
    check_numbers,
    check_tools,
    tool_names,
    with_edits,
)
from leyline_policies.context import Context
from leyline_policies.conversation import tags_of, text_of
from leyline_policies.marks import Mark, MarkedMessage
from leyline_policies.policy import Message, Mode
from leyline_policies.recall import sources_of
from leyline_policies.stubs import Evicted, address_of, stub_lines

Count = Callable[[Message], int]

_MOST_PARTS = 16
_LONGEST_NAME = 50
"""Characters of a tool's name that leave room for a piece's number in a stub."""


@dataclass(frozen=True, slots=True)
class Offload:
    """Replace tool results of ``max_chars`` characters or more by a preview and addresses, at once.

    The preview is the text's first and last characters, ``preview_chars`` together. The whole text
    is cut into pieces of ``part_chars`` characters (of a very long one, 16 equal pieces), each
    under its own address: with the proxy's setting ``recall`` on, the model gets back the pieces
    that it asks for. Pictures and files in a result stay. With ``tools`` only results of these
    tools are offloaded; those of ``exclude_tools`` stay, which are by default what was recalled.

    The rule and the form of the text are those of ``Spill`` in pydantic-ai-harness 0.62
    (``ToolOutputLimits``). Different from it: addresses of pieces take the place of one handle and
    of the tool that reads from it by lines; there is no sketch of the shape; a text that would not
    get shorter stays.
    """

    name: ClassVar[str] = "offload"
    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    max_chars: int = 10_000
    preview_chars: int = 1_000
    part_chars: int = 16_000
    tools: tuple[str, ...] | None = None
    exclude_tools: tuple[str, ...] = ("leyline_recall",)

    def __post_init__(self) -> None:
        """Raise ValueError for a number out of range or an empty ``tools``."""
        check_numbers(1, max_chars=self.max_chars, part_chars=self.part_chars)
        check_numbers(0, preview_chars=self.preview_chars)
        if self.preview_chars >= self.max_chars:
            raise ValueError(
                f"preview_chars={self.preview_chars} must be less than max_chars={self.max_chars}"
            )
        check_tools("tools", self.tools)

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages with oversized results offloaded."""
        is_large = context.each(messages, self._is_large)
        large = [at for at in context.results(messages) if is_large[at]]
        if not large:
            return messages
        chosen = of_tools(large, messages, context, tools=self.tools, exclude=self.exclude_tools)
        names = tool_names(messages, context)
        edits: dict[int, Message] = {}
        for at in chosen:
            offloaded = partial(self._offloaded, tool=names[at], count=context.count)
            edits[at] = context.once(messages[at], offloaded, names[at])
        return with_edits(messages, edits)

    def _is_large(self, message: Message) -> bool:
        return len(text_of(message)) >= self.max_chars

    def _offloaded(self, message: Message, tool: str, count: Count) -> Message:
        text = text_of(message)
        parts = tuple(self._parts(message, text, tool, count))
        told = (
            f"[Tool output too large ({len(text):,} chars); its text can be recalled by address:]\n"
            f"{stub_lines(parts)}\n{self._preview(text)}"
        )
        if len(told) >= len(text):
            return message
        content = message["content"]
        if isinstance(content, list):
            others = [part for part in content if not _is_text(part)]
            told_parts = [{"type": "text", "text": told}, *others]
            return _marked(message, told_parts, parts)
        return _marked(message, told, parts)

    def _parts(self, message: Message, text: str, tool: str, count: Count) -> Iterator[Evicted]:
        """Yield the pieces of a text, each with the tool's name and its own number."""
        name, sources = tool[:_LONGEST_NAME] or "tool", sources_of(message)
        size = max(self.part_chars, -(-len(text) // _MOST_PARTS))
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        for number, piece in enumerate(pieces, 1):
            role = str(message.get("role"))
            yield Evicted(
                address_of(piece),
                piece,
                role,
                tool if len(pieces) == 1 else f"{name}:{number}/{len(pieces)}",
                count({"role": role, "content": piece}),
                self.name,
                tags_of(message),
                sources=sources,
            )

    def _preview(self, text: str) -> str:
        head = self.preview_chars // 2
        tail = self.preview_chars - head
        left_out = len(text) - self.preview_chars
        ends = (text[:head], text[len(text) - tail :])
        return f"{ends[0]}\n...[{left_out:,} chars omitted]...\n{ends[1]}"


def _marked(message: Message, content: Any, parts: Sequence[Evicted]) -> Message:
    return MarkedMessage({**message, "content": content}, message, Mark(evicted=tuple(parts)))


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and isinstance(part.get("text"), str))
