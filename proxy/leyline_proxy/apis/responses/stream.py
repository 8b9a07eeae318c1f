"""Map chunks of a chat completion to events of a response."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..chat_answers import (
    MIXED,
    NAMELESS,
    AnswerError,
    StreamedAnswer,
    call_parts,
    content_of,
    reasoning_of,
    text_or_none,
    whole_arguments,
)
from ..events import Event
from ..streamed_calls import StreamedCall, StreamedCalls
from .answer import Opening, ending, failed_error, map_usage, message_item, text_part
from .calls import Tool, custom_input, opened_call, whole_call
from .reasoning import reasoning_item


@dataclass(slots=True)
class _Said:
    """An open message or reasoning."""

    kind: str
    index: int
    id: str
    parts: list[dict[str, Any]] = field(default_factory=list)
    """Complete parts."""
    part: str = ""
    """Type of the open part."""
    held: list[str] = field(default_factory=list)
    """Text of the open part."""


@dataclass(slots=True)
class _Call:
    """An open call."""

    call: StreamedCall
    arguments: list[str] = field(default_factory=list)
    tool: Tool | None = None
    """None until the whole name is known."""
    index: int = -1
    """Place in the output, once the item has begun; a local shell's begins at its end."""
    id: str = ""
    call_id: str = ""
    """As it was first shown; an engine's that comes later is too late."""


class ResponseEvents:
    """The events of one answer, numbered. An item is done before the next begins, except for calls
    that the engine writes in turn: each is done once it is whole.

    The relay bounds what is held, with the whole stream (``keeps``). ``response`` is the whole
    document once the answer has ended.
    """

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self.started = False
        self.ended = False
        self.response: dict[str, Any] | None = None
        self._number = 0
        self._fed = False
        self._model: object = None
        self._output: dict[int, dict[str, Any]] = {}
        """Items that are done, by their places."""
        self._begun = 0
        """Number of items that have begun."""
        self._said: _Said | None = None
        self._open: dict[int, _Call] = {}
        """Open calls by their numbers."""
        self._calls = StreamedCalls()
        self._called = 0
        """Number of calls that have come."""
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
            AnswerError: a call goes on after its end.
        """
        if not self._fed:
            self._fed = True
            self._model = chunk.get("model")
            yield from self.begin()
            for item in self._opening.before:
                index = self._next()
                yield self._event("response.output_item.added", output_index=index, item=item)
                self._output[index] = {**item}
                yield self._event("response.output_item.done", output_index=index, item=item)
        delta = self._answer.read(chunk)
        if delta is not None and not self.ended:
            yield from self._delta(delta)

    def close(self) -> Iterator[Event]:
        """Yield the events that end the response, once.

        Raises:
            AnswerError: the engine never reported a finish reason, or never named a call.
        """
        if self.ended:
            return
        status, reason = ending(self._answer.finish)
        opening = self._opening
        nothing = not any(call.name for call in self._calls.calls) and self._begun == len(
            opening.before
        )
        if nothing and not opening.alone:
            yield from self._ensure("message")
            yield from self._ensure_part("output_text")
        yield from self._close_all(status)
        self.ended = True
        document = self._opening.document(status, self._items, model=self._model, reason=reason)
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
            "failed", self._items, model=self._model, error=failed_error(status, message, code)
        )
        yield self._event("response.failed", response={**document, "usage": None})

    @property
    def _items(self) -> list[dict[str, Any]]:
        return [self._output[index] for index in sorted(self._output)]

    def _next(self) -> int:
        index, self._begun = self._begun, self._begun + 1
        return index

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        if reasoning := reasoning_of(delta):
            yield from self._say("reasoning", "reasoning_text", reasoning)
        if text := content_of(delta):
            yield from self._say("message", "output_text", text)
        if refusal := text_or_none(delta.get("refusal")):
            yield from self._say("message", "refusal", refusal)
        for part in call_parts(delta):
            if isinstance(part, Mapping) and (taken := self._calls.take(part)) is not None:
                yield from self._called_with(*taken)

    def _say(self, kind: str, part: str, text: str) -> Iterator[Event]:
        yield from self._close_whole(None)
        said = yield from self._ensure(kind)
        yield from self._ensure_part(part)
        said.held.append(text)
        extra: dict[str, Any] = {"logprobs": []} if part == "output_text" else {}
        yield self._part_event(f"response.{part}.delta", delta=text, **extra)

    def _ensure(self, kind: str) -> Generator[Event, None, _Said]:
        if self._said is not None and self._said.kind == kind:
            return self._said
        yield from self._close_said("completed")
        index = self._next()
        said = self._said = _Said(kind, index, self._opening.item_id(kind, index))
        if kind == "reasoning":
            shown = reasoning_item(said.id, "", carried=False, status="in_progress")
        else:
            shown = message_item(said.id, (), "in_progress")
        yield self._event("response.output_item.added", output_index=index, item=shown)
        return said

    def _ensure_part(self, part: str) -> Iterator[Event]:
        said = self._saying
        if said.part == part:
            return
        yield from self._close_part()
        said.part = part
        yield self._part_event("response.content_part.added", part=_part(part, ""))

    def _close_part(self) -> Iterator[Event]:
        said = self._saying
        if not said.part:
            return
        text = "".join(said.held)
        whole = _part(said.part, text)
        name = "refusal" if said.part == "refusal" else "text"
        extra: dict[str, Any] = {"logprobs": []} if said.part == "output_text" else {}
        yield self._part_event(f"response.{said.part}.done", **{name: text}, **extra)
        yield self._part_event("response.content_part.done", part=whole)
        said.parts.append(whole)
        said.part, said.held = "", []

    def _close_said(self, status: str) -> Iterator[Event]:
        said = self._said
        if said is None:
            return
        yield from self._close_part()
        if said.kind == "message":
            shown = message_item(said.id, said.parts, status)
        else:
            text = "".join(part["text"] for part in said.parts)
            carried = self._opening.carries_reasoning
            shown = reasoning_item(said.id, text, carried=carried, status=status)
        yield self._done(said.index, shown)
        self._said = None

    def _called_with(self, call: StreamedCall, arguments: str) -> Iterator[Event]:
        yield from self._close_said("completed")
        yield from self._close_whole(call)
        item = self._open.get(call.number)
        if item is None:
            if call.number < self._called:
                if arguments.strip():
                    raise AnswerError(MIXED)
                return
            self._called += 1
            item = self._open[call.number] = _Call(call)
        if arguments:
            item.arguments.append(arguments)
        if item.tool is not None and item.tool.kind == "function" and arguments:
            yield self._call_event(item, "function_call_arguments.delta", delta=arguments)
        yield from self._begin_calls()

    def _begin_calls(self) -> Iterator[Event]:
        """Begin the calls that can be shown, in their order."""
        items = list(self._open.values())
        for at, item in enumerate(items):
            named = item.call.name and (item.call.begun or at < len(items) - 1)
            if item.tool is None and not named:
                return
            if item.tool is None:
                yield from self._begin_call(item)

    def _begin_call(self, item: _Call) -> Iterator[Event]:
        tool = item.tool = self._opening.tools.called(item.call.name)
        # A local shell's call can't be shown until its arguments are complete.
        if tool.kind == "local_shell":
            return
        shown = opened_call(tool, *self._place(item))
        yield self._event("response.output_item.added", output_index=item.index, item=shown)
        if tool.kind == "function" and item.arguments:
            delta = "".join(item.arguments)
            yield self._call_event(item, "function_call_arguments.delta", delta=delta)

    def _place(self, item: _Call) -> tuple[str, str]:
        """Give a call its place in the output; return the ids of the item and of the call."""
        assert item.tool is not None  # noqa: S101 - it was begun
        item.index = self._next()
        item.id = self._opening.item_id(item.tool.item_type, item.index)
        item.call_id = item.call.id or self._opening.call_id(item.index)
        return item.id, item.call_id

    def _close_whole(self, but: StreamedCall | None) -> Iterator[Event]:
        """Yield the ends of calls that are whole, except for one that goes on."""
        for item in [each for each in self._open.values() if each.call is not but]:
            if item.call.whole and item.tool is not None:
                yield from self._close_call(item, "completed")

    def _close_all(self, status: str) -> Iterator[Event]:
        """Yield the ends of all that is open. Only what the model didn't finish has the status."""
        calls = any(item.call.name for item in self._open.values())
        yield from self._close_said("completed" if calls else status)
        if any(item.call.nameless for item in self._open.values()):
            raise AnswerError(NAMELESS)
        items = [item for item in self._open.values() if item.call.name]
        for item in items:
            if item.tool is None:
                yield from self._begin_call(item)
            unfinished = item is items[-1] or not item.call.whole
            yield from self._close_call(item, status if unfinished else "completed")

    def _close_call(self, item: _Call, status: str) -> Iterator[Event]:
        tool = item.tool
        assert tool is not None  # noqa: S101 - it was begun
        arguments = "".join(item.arguments)
        if status == "completed" and (whole := whole_arguments(arguments)) != arguments:
            arguments = whole
            if tool.kind == "function":
                yield self._call_event(item, "function_call_arguments.delta", delta=whole)
        if tool.kind == "local_shell":
            self._place(item)
        shown = whole_call(tool, item.id, item.call_id, arguments, status)
        if tool.kind == "function":
            yield self._call_event(item, "function_call_arguments.done", arguments=arguments)
        elif tool.kind == "custom":
            given = custom_input(arguments)
            yield self._call_event(item, "custom_tool_call_input.delta", delta=given)
            yield self._call_event(item, "custom_tool_call_input.done", input=given)
        else:
            begun = {**shown, "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=item.index, item=begun)
        yield self._done(item.index, shown)
        del self._open[item.call.number]

    def _done(self, index: int, shown: dict[str, Any]) -> Event:
        self._output[index] = shown
        return self._event("response.output_item.done", output_index=index, item=shown)

    @property
    def _saying(self) -> _Said:
        if self._said is None:
            raise AnswerError("The engine's answer has a part outside of any item.")
        return self._said

    def _part_event(self, kind: str, **members: Any) -> Event:
        said = self._saying
        where = {"item_id": said.id, "output_index": said.index, "content_index": len(said.parts)}
        return self._event(kind, **where, **members)

    def _call_event(self, item: _Call, kind: str, **members: Any) -> Event:
        return self._event(f"response.{kind}", item_id=item.id, output_index=item.index, **members)

    def _event(self, kind: str, **members: Any) -> Event:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **members}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "output_text":
        return text_part(text)
    return {"type": kind, "refusal" if kind == "refusal" else "text": text}
