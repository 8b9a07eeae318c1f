"""Map chunks of a chat completion to events of a message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ...model.compaction import CompactionReport
from ..chat_answers import AnswerError, StreamedAnswer, reasoning_of, text_or_none
from ..events import Event, encoded
from .answer import PAUSED, SIGNATURE, map_usage, message_head, stop_members
from .compaction import COMPACTION, with_iterations

NO_TOKENS = {
    "input_tokens": 0,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "output_tokens": 0,
}
"""Usage before the engine reports any. Counts of later events replace it."""


@dataclass(slots=True)
class _Call:
    """A tool call in progress."""

    index: object
    id: str | None = None
    name: str | None = None
    held: str = ""
    """Arguments received before the name."""

    def is_another(self, index: object, identifier: str | None) -> bool:
        """Return True if a part belongs to another call; some servers give all the same index."""
        return self.index != index or bool(self.id and identifier and identifier != self.id)


class MessageEvents:
    """The events of one answer. Blocks follow one another; each is closed before the next.

    Args:
        model: used if the engine names none.
        stop_sequences: the request's.
        head: further members of the message, known before its first token.
        before: blocks in front of the model's: a compaction.
        compaction: report of it.
    """

    def __init__(
        self,
        *,
        message_id: str,
        model: str,
        stop_sequences: Sequence[str],
        head: Mapping[str, Any] = MappingProxyType({}),
        before: Sequence[Mapping[str, Any]] = (),
        compaction: CompactionReport | None = None,
    ) -> None:
        self._before = before
        self._compaction = compaction
        self._alone = compaction is not None and compaction.paused
        self._id = message_id
        self._head = head
        self._model = model
        self._stops = stop_sequences
        self.started = False
        self.ended = False
        self._open: str | None = None
        """Type of the open block."""
        self._block = -1
        self._call: _Call | None = None
        self._called: list[object] = []
        self._refused = False
        self._answer = StreamedAnswer()

    def feed(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events that a chunk adds.

        Raises:
            AnswerError: tool calls can't be distinguished.
        """
        if not self.started:
            self.started = True
            yield self._start(chunk.get("model"))
            yield {"type": "ping"}
            for block in self._before:
                yield self._begin(COMPACTION, {"content": None, "encrypted_content": None})
                yield self._added({**block, "type": "compaction_delta"})
                yield from self._close_block()
        delta = self._answer.read(chunk)
        if delta is not None and not self._alone:
            yield from self._delta(delta)

    def close(self) -> Iterator[Event]:
        """Yield the events that end the message, once.

        Raises:
            AnswerError: the engine never reported a finish reason.
        """
        if self.ended:
            return
        finish = self._answer.finish
        self.ended = True
        yield from self._close_block()
        stop = stop_members(finish, self._stops, calls=bool(self._called), refused=self._refused)
        extra = self._answer.extra
        usage = map_usage(self._answer.usage, extra.get("leyline"))
        if self._alone:
            stop, usage = PAUSED, {**NO_TOKENS}
        usage = with_iterations(usage, self._compaction, counted=not self._alone)
        yield {"type": "message_delta", "delta": stop, "usage": usage, **extra}
        yield {"type": "message_stop"}

    def keep_alive(self, comment: bytes) -> bytes:
        """Return a ping, once the message has begun."""
        return encoded([{"type": "ping"}]) if comment and self.started else b""

    def _start(self, model: object) -> Event:
        message = {
            **message_head(self._id, model or self._model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": NO_TOKENS,
            **self._head,
        }
        return {"type": "message_start", "message": message}

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        if thinking := reasoning_of(delta):
            yield from self._ensure("thinking", {"thinking": "", "signature": ""})
            yield self._added({"type": "thinking_delta", "thinking": thinking})
        refusal = text_or_none(delta.get("refusal"))
        self._refused = self._refused or bool(refusal)
        for text in (text_or_none(delta.get("content")), refusal):
            if text:
                yield from self._ensure("text", {"text": ""})
                yield self._added({"type": "text_delta", "text": text})
        for call in delta.get("tool_calls") or ():
            if isinstance(call, Mapping):
                yield from self._called_with(call)

    def _called_with(self, part: Mapping[str, Any]) -> Iterator[Event]:
        function = part.get("function")
        function = function if isinstance(function, Mapping) else {}
        index, identifier = part.get("index"), text_or_none(part.get("id"))
        call = self._call
        if call is None or call.is_another(index, identifier):
            yield from self._close_block()
            if index in self._called and identifier is None:
                raise AnswerError("The engine mixes the arguments of several tool calls.")
            call = self._call = _Call(index)
            self._called.append(index)
        call.id = call.id or identifier
        arguments = text_or_none(function.get("arguments")) or ""
        if self._open is None:
            call.name = call.name or text_or_none(function.get("name"))
            call.held += arguments
            if not call.name:
                return
            named = {"id": call.id or f"{self._id}-{len(self._called)}", "name": call.name}
            yield self._begin("tool_use", {**named, "input": {}})
            arguments = call.held
        if arguments:
            yield self._added({"type": "input_json_delta", "partial_json": arguments})

    def _ensure(self, kind: str, block: Mapping[str, Any]) -> Iterator[Event]:
        if self._open != kind:
            yield from self._close_block()
            yield self._begin(kind, block)

    def _begin(self, kind: str, block: Mapping[str, Any]) -> Event:
        self._open = kind
        self._block += 1
        content = {"type": kind, **block}
        return {"type": "content_block_start", "index": self._block, "content_block": content}

    def _added(self, delta: Mapping[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._block, "delta": delta}

    def _close_block(self) -> Iterator[Event]:
        if self._call is not None and self._open is None:
            raise AnswerError("The engine's answer has a tool call without a name.")
        if self._open == "thinking":
            yield self._added({"type": "signature_delta", "signature": SIGNATURE})
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._block}
        self._open = self._call = None
