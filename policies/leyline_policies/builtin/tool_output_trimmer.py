"""The policy that turns large tool outputs of older turns into previews."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from leyline_policies.builtin.tool_results import (
    check_numbers,
    check_tools,
    tool_names,
    with_edits,
)
from leyline_policies.context import Context
from leyline_policies.marks import edit
from leyline_policies.policy import Message, Mode

_HEADER = "[Trimmed]"


@dataclass(frozen=True, slots=True)
class ToolOutputTrimmer:
    """Replace tool outputs of more than ``max_output_chars`` by a preview, outside recent turns.

    A turn begins with a user message; everything after the ``recent_turns``-th last one stays. A
    text becomes a line that names the tool and the length, and its first ``preview_chars``
    characters. A part list becomes a text within ``max_output_chars`` that also counts the images
    and files that it drops. With ``trimmable_tools`` only outputs of these tools are trimmed.

    The rule and its texts are those of the OpenAI Agents SDK's ``ToolOutputTrimmer``
    (openai-agents 0.24.0, agents/extensions/tool_output_trimmer.py). Different from it: an output
    belongs to the latest call of its id before it, not to the last of all calls with that id; and
    outputs of the tool search, which chat messages don't have, are not its concern.
    """

    name: ClassVar[str] = "tool_output_trimmer"
    mode: ClassVar[Mode] = "amortize"
    trusted: ClassVar[bool] = True

    recent_turns: int = 2
    max_output_chars: int = 500
    preview_chars: int = 200
    trimmable_tools: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a number out of range or an empty ``trimmable_tools``."""
        check_numbers(1, recent_turns=self.recent_turns, max_output_chars=self.max_output_chars)
        check_numbers(0, preview_chars=self.preview_chars)
        check_tools("trimmable_tools", self.trimmable_tools)

    def transform(self, messages: list[Message], turn_idx: int, context: Context) -> list[Message]:
        """Return the messages with large outputs of older turns trimmed."""
        users = context.users(messages)
        recent = users[-self.recent_turns] if len(users) >= self.recent_turns else 0
        if not recent:
            return messages
        is_large = context.each(messages, self._is_large)
        large = [i for i in context.results(messages) if i < recent and is_large[i]]
        if not large:
            return messages
        names = tool_names(messages, context)
        tools = self.trimmable_tools
        return with_edits(
            messages,
            {
                index: self._trimmed(messages[index], names[index], context)
                for index in large
                if tools is None or names[index] in tools
            },
        )

    def _is_large(self, message: Message) -> bool:
        content = message.get("content")
        if isinstance(content, str):
            return len(content) > self.max_output_chars
        payload = _payload(content) if isinstance(content, list) else None
        return payload is not None and payload.length > self.max_output_chars

    def _trimmed(self, message: Message, tool: str, context: Context) -> Message:
        def compute(message: Message) -> Message:
            content = message["content"]
            named = tool or "unknown_tool"
            if isinstance(content, str):
                text = self._preview_of_text(content, named)
                return edit(message, content=text) if len(text) < len(content) else message
            return edit(message, content=self._preview_of_parts(content, named))

        return context.once(message, compute, tool)

    def _preview_of_text(self, text: str, tool: str) -> str:
        header = f"[Trimmed: {tool} output — {len(text)} chars → {self.preview_chars} char preview]"
        return f"{header}\n{text[: self.preview_chars]}..."

    def _preview_of_parts(self, content: Sequence[Any], tool: str) -> str:
        """Return the longest header that fits, and the text that fits below the shortest."""
        payload = _payload(content)
        assert payload is not None  # noqa: S101  # _is_large has looked
        limit = self.max_output_chars
        if limit < len(_HEADER):
            return _HEADER[:limit]
        shown = max(0, min(len(payload.text), self.preview_chars, limit - len(_HEADER) - 1))
        body = f"\n{payload.text[:shown]}" if shown else ""
        if shown < len(payload.text) and len(_HEADER) + len(body) + len("...") <= limit:
            body += "..."
        headers = _headers(payload, tool, shown)
        return next(head for head in headers if len(head) + len(body) <= limit) + body


@dataclass(frozen=True, slots=True)
class _Payload:
    """The contents of a part list for the model."""

    length: int
    text: str
    dropped: Mapping[str, int]
    """Number of parts of each other type."""


def _headers(payload: _Payload, tool: str, shown: int) -> list[str]:
    """Return the headers to choose from, the most informative first."""
    note = ""
    if payload.dropped:
        counts = sorted(payload.dropped.items())
        note = "; dropped " + ", ".join(f"{count} {kind}" for kind, count in counts)
    preview = f"; preview {shown}" if payload.text else ""
    headers = [f"[Trimmed: {tool}; payload {payload.length}{preview}{note}]"]
    if payload.dropped:
        headers += [
            f"[Trimmed: {tool}{note}]",
            f"[Trimmed{note}]",
            f"[Trimmed: {', '.join(sorted(payload.dropped))}]",
            f"[Trimmed: dropped {sum(payload.dropped.values())} opaque]",
        ]
    return [*headers, f"[Trimmed: payload {payload.length}]", f"[Trimmed: {tool}]", _HEADER]


def _payload(content: Sequence[Any]) -> _Payload | None:
    """Return the contents of a list of text, image and file parts; None for any other list."""
    texts: list[str] = []
    length = 0
    dropped: Counter[str] = Counter()
    for part in content:
        if not isinstance(part, dict):
            return None
        kind = part.get("type")
        if kind in ("text", "input_text") and isinstance(part.get("text"), str):
            texts.append(part["text"])
            length += len(part["text"])
            continue
        held = _opaque(part)
        if held is None:
            return None
        name, size = held
        dropped[name] += 1
        length += size
    return _Payload(length, "\n".join(texts), dropped) if content else None


def _opaque(part: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return an image's or file's type, as in the Responses API, and the length of its data."""
    kind = part.get("type")
    if kind in ("image_url", "input_image"):
        image = part.get("image_url")
        body = image if isinstance(image, dict) else part
        values = (body.get("url"), body.get("image_url"), body.get("file_id"))
        name, more = "input_image", (body.get("detail"),)
    elif kind in ("file", "input_file"):
        file = part.get("file")
        body = file if isinstance(file, dict) else part
        values = (body.get("file_data"), body.get("file_url"), body.get("file_id"))
        name, more = "input_file", (body.get("filename"),)
    else:
        return None
    if not any(isinstance(value, str) for value in values):
        return None
    return name, sum(len(value) for value in (*values, *more) if isinstance(value, str))
