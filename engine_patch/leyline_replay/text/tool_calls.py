"""``<tool_call>`` blocks in generated text, as OpenAI tool calls."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from uuid import uuid4

from leyline_replay.models.tiny_chat_template import TOOL_CALL_CLOSE, TOOL_CALL_OPEN
from leyline_replay.text.stops import partial_suffix

_CANONICAL = re.compile(r'\{"name": "([^"\\]+)", "arguments": (\{.*\})\}', re.DOTALL)
_MARKS = ("\n" + TOOL_CALL_OPEN, TOOL_CALL_OPEN)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One complete call; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """The output of a piece of text: plain text first, then complete calls."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class ToolCallParser:
    """Splits a stream of text into content and tool calls.

    A line break before a block belongs to the block, so that rendering content and calls again
    gives the generated text. A block that isn't valid JSON, or is never closed, stays text.
    """

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> ToolOutput:
        """Take the next piece of text; a call is returned once it is complete."""
        self._held += text
        emitted: list[str] = []
        calls: list[ToolCall] = []
        while True:
            opened = self._held.find(TOOL_CALL_OPEN)
            if opened < 0:
                keep = partial_suffix(self._held, _MARKS)
                emitted.append(self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
                break
            closed = self._held.find(TOOL_CALL_CLOSE, opened)
            if closed < 0:
                begin = opened - 1 if self._held[:opened].endswith("\n") else opened
                emitted.append(self._held[:begin])
                self._held = self._held[begin:]
                break
            block_end = closed + len(TOOL_CALL_CLOSE)
            call = parse_tool_call(self._held[opened + len(TOOL_CALL_OPEN) : closed])
            if call is None:
                emitted.append(self._held[:block_end])
            else:
                emitted.append(self._held[:opened].removesuffix("\n"))
                calls.append(call)
            self._held = self._held[block_end:]
        return ToolOutput("".join(emitted), tuple(calls))

    def flush(self) -> str:
        """Return the text held back, when no more follows."""
        held, self._held = self._held, ""
        return held


def parse_tool_call(block: str) -> ToolCall | None:
    """Return the call in a block's inner text, or None if it isn't one.

    Arguments keep the characters that the model wrote, if the block has the usual form.
    """
    inner = block.strip()
    try:
        parsed = json.loads(inner)
    except (ValueError, RecursionError):
        return None
    match parsed:
        case {"name": str(name), **rest} if name:
            arguments = rest.get("arguments", rest.get("parameters", {}))
        case _:
            return None
    text = arguments if isinstance(arguments, str) else _verbatim(inner, arguments)
    return ToolCall(f"call_{uuid4().hex[:24]}", name, text)


def _verbatim(inner: str, arguments: object) -> str:
    canonical = _CANONICAL.fullmatch(inner)
    if canonical is not None:
        try:
            if json.loads(canonical.group(2)) == arguments:
                return canonical.group(2)
        except ValueError:
            pass
    return json.dumps(arguments, ensure_ascii=False)
