"""Map chunks of a chat completion to events of a response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..chat_answers import AnswerError, StreamedAnswer, reasoning_of, text_or_none
from ..events import Event
from .answer import Opening, ending, failed_error, map_usage, message_item, text_part
from .calls import Tool, custom_input, opened_call, whole_call
from .reasoning import reasoning_item


@dataclass(slots=True)
class _Item:
    """The open item."""

    kind: str
    index: int
    id: str = ""
    parts: list[dict[str, Any]] = field(default_factory=list)
    """Complete parts of a message."""
    part: str = ""
    """Type of the open part."""
    held: list[str] = field(default_factory=list)
    """Text of the open part, or arguments."""
    call: object = None
    """The engine's index of a call."""
    call_id: str | None = None
    tool: Tool | None = None
    """None until the engine has sent the name."""

    @property
    def text(self) -> str:
        return "".join(self.held)

    def is_other_call(self, index: object, identifier: str | None) -> bool:
        """Return True if a part belongs to another call; some servers give all the same index."""
        if self.kind != "call" or self.call != index:
            return True
        return bool(self.call_id and identifier and identifier != self.call_id)


class ResponseEvents:
    """The events of one answer, numbered. Items follow one another; each is done before the next.

    ``response`` is the whole document once the answer has ended.
    """

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self.started = False
        self.ended = False
        self.response: dict[str, Any] | None = None
        self._number = 0
        self._fed = False
        self._model: object = None
        self._output: list[dict[str, Any]] = []
        self._item: _Item | None = None
        self._called: list[object] = []
        self._answer = StreamedAnswer()

    def begin(self) -> Iterator[Event]:
        """Yield the events that open the response, once; the first chunk brings them, too."""
        if self.started:
            return
        self.started = True
        document = {**self._opening.document("in_progress", model=self._model), "usage": None}
        yield self._event("response.created", response=document)
        yield self._event("response.in_progress", response=document)

    def goes_on(self, opening: Opening) -> None:
        """Take what is known now of a response that may have begun."""
        self._opening = opening

    def feed(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events that a chunk adds.

        Raises:
            AnswerError: tool calls can't be distinguished.
        """
        if not self._fed:
            self._fed = True
            self._model = chunk.get("model")
            yield from self.begin()
            for item in self._opening.before:
                index = len(self._output)
                yield self._event("response.output_item.added", output_index=index, item=item)
                self._output.append({**item})
                yield self._event("response.output_item.done", output_index=index, item=item)
        delta = self._answer.read(chunk)
        if delta is not None and not self.ended:
            yield from self._delta(delta)

    def close(self) -> Iterator[Event]:
        """Yield the events that end the response, once.

        Raises:
            AnswerError: the engine never reported a finish reason.
        """
        if self.ended:
            return
        status, reason = ending(self._answer.finish)
        opening = self._opening
        nothing = self._item is None and len(self._output) == len(opening.before)
        if nothing and not opening.alone:
            yield from self._ensure("message")
            yield from self._ensure_part("output_text")
        yield from self._close_item(status)
        self.ended = True
        document = self._opening.document(status, self._output, model=self._model, reason=reason)
        extra = self._answer.extra
        usage = map_usage(self._answer.usage, extra.get("leyline"))
        self.response = {**document, "usage": usage, **extra}
        yield self._event(f"response.{status}", response=self.response)

    def keep_alive(self, comment: bytes) -> bytes:
        """Return the comment; this API has comments, too."""
        return comment

    def fail(
        self, status: int, message: str, *, code: str | None, param: str | None
    ) -> Iterator[Event]:
        """Yield the events that end the response with an error, once.

        Args:
            status: the HTTP status of the error.
        """
        if self.ended:
            return
        self.ended = True
        yield self._event("error", code=code, message=message, param=param)
        document = self._opening.document(
            "failed", self._output, model=self._model, error=failed_error(status, message)
        )
        yield self._event("response.failed", response={**document, "usage": None})

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        if reasoning := reasoning_of(delta):
            yield from self._said("reasoning", "reasoning_text", reasoning)
        if text := text_or_none(delta.get("content")):
            yield from self._said("message", "output_text", text)
        if refusal := text_or_none(delta.get("refusal")):
            yield from self._said("message", "refusal", refusal)
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, Mapping):
                yield from self._called_with(call)

    def _said(self, kind: str, part: str, text: str) -> Iterator[Event]:
        yield from self._ensure(kind)
        yield from self._ensure_part(part)
        item = self._opened
        item.held.append(text)
        extra: dict[str, Any] = {"logprobs": []} if part == "output_text" else {}
        yield self._part_event(f"response.{part}.delta", delta=text, **extra)

    def _ensure(self, kind: str) -> Iterator[Event]:
        if self._item is not None and self._item.kind == kind:
            return
        yield from self._close_item("completed")
        index = len(self._output)
        item = self._item = _Item(kind, index, self._opening.item_id(kind, index))
        if kind == "reasoning":
            shown = reasoning_item(item.id, "", carried=False, status="in_progress")
        else:
            shown = message_item(item.id, (), "in_progress")
        yield self._event("response.output_item.added", output_index=index, item=shown)

    def _ensure_part(self, part: str) -> Iterator[Event]:
        item = self._opened
        if item.part == part:
            return
        yield from self._close_part()
        item.part = part
        yield self._part_event("response.content_part.added", part=_part(part, ""))

    def _close_part(self) -> Iterator[Event]:
        item = self._opened
        if not item.part:
            return
        whole = _part(item.part, item.text)
        name = "refusal" if item.part == "refusal" else "text"
        extra: dict[str, Any] = {"logprobs": []} if item.part == "output_text" else {}
        yield self._part_event(f"response.{item.part}.done", **{name: item.text}, **extra)
        yield self._part_event("response.content_part.done", part=whole)
        item.parts.append(whole)
        item.part, item.held = "", []

    def _called_with(self, part: Mapping[str, Any]) -> Iterator[Event]:
        function = part.get("function")
        function = function if isinstance(function, Mapping) else {}
        index, identifier = part.get("index"), text_or_none(part.get("id"))
        if self._item is None or self._item.is_other_call(index, identifier):
            yield from self._close_item("completed")
            if index in self._called and identifier is None:
                raise AnswerError("The engine mixes the arguments of several tool calls.")
            self._item = _Item("call", len(self._output), call=index)
            self._called.append(index)
        item = self._opened
        item.call_id = item.call_id or identifier
        arguments = text_or_none(function.get("arguments")) or ""
        if arguments:
            item.held.append(arguments)
        if item.tool is None:
            name = text_or_none(function.get("name"))
            if not name:
                return
            yield from self._begin_call(item, self._opening.tools.called(name))
            arguments = item.text
        if arguments and item.tool is not None and item.tool.kind == "function":
            yield self._item_event("response.function_call_arguments.delta", delta=arguments)

    def _begin_call(self, item: _Item, tool: Tool) -> Iterator[Event]:
        item.tool = tool
        item.id = self._opening.item_id(tool.item_type, item.index)
        item.call_id = item.call_id or self._opening.call_id(item.index)
        # A local shell's call can't be shown until its arguments are complete.
        if tool.kind != "local_shell":
            shown = opened_call(tool, item.id, item.call_id)
            yield self._event("response.output_item.added", output_index=item.index, item=shown)

    def _close_item(self, status: str) -> Iterator[Event]:
        item = self._item
        if item is None:
            return
        if item.kind == "call":
            yield from self._close_call(item, status)
        else:
            yield from self._close_part()
            if item.kind == "message":
                shown = message_item(item.id, item.parts, status)
            else:
                text = "".join(part["text"] for part in item.parts)
                carried = self._opening.carries_reasoning
                shown = reasoning_item(item.id, text, carried=carried, status=status)
            yield self._done(item, shown)
        self._item = None

    def _close_call(self, item: _Item, status: str) -> Iterator[Event]:
        if item.tool is None or item.call_id is None:
            raise AnswerError("The engine's answer has a tool call without a name.")
        arguments = item.text
        shown = whole_call(item.tool, item.id, item.call_id, arguments, status)
        if item.tool.kind == "function":
            yield self._item_event("response.function_call_arguments.done", arguments=arguments)
        elif item.tool.kind == "custom":
            given = custom_input(arguments)
            yield self._item_event("response.custom_tool_call_input.delta", delta=given)
            yield self._item_event("response.custom_tool_call_input.done", input=given)
        else:
            begun = {**shown, "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=item.index, item=begun)
        yield self._done(item, shown)

    def _done(self, item: _Item, shown: dict[str, Any]) -> Event:
        self._output.append(shown)
        return self._event("response.output_item.done", output_index=item.index, item=shown)

    @property
    def _opened(self) -> _Item:
        if self._item is None:
            raise AnswerError("The engine's answer has a part outside of any item.")
        return self._item

    def _part_event(self, kind: str, **members: Any) -> Event:
        return self._item_event(kind, content_index=len(self._opened.parts), **members)

    def _item_event(self, kind: str, **members: Any) -> Event:
        item = self._opened
        return self._event(kind, item_id=item.id, output_index=item.index, **members)

    def _event(self, kind: str, **members: Any) -> Event:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **members}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "output_text":
        return text_part(text)
    return {"type": kind, "refusal" if kind == "refusal" else "text": text}
