"""Map chunks of a chat completion to events of a message."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ...model.compaction import CompactionReport
from ..chat_answers import (
    MIXED,
    NAMELESS,
    AnswerError,
    StreamedAnswer,
    call_parts,
    content_of,
    reasoning_of,
    text_or_none,
)
from ..events import Event, encoded
from ..streamed_calls import StreamedCall, StreamedCalls
from .answer import PAUSED, SIGNATURE, map_usage, message_head, stop_members
from .compaction import COMPACTION, with_iterations

NO_TOKENS = {
    "input_tokens": 0,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 0,
    "output_tokens": 0,
}
"""Usage if no tokens are known. Counts of later events replace it."""


@dataclass(slots=True)
class _Block:
    """A block that isn't closed yet."""

    kind: str
    call: StreamedCall | None = None
    held: list[str] = field(default_factory=list)
    """What waits until the block may begin."""
    opened: bool = False
    closed: bool = False


_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessageEvents:
    """The events of one answer. Blocks follow one another; each is closed before the next.

    An engine may write several calls in turn. The first block that isn't whole is the open one, and
    the others wait for it. The relay bounds what waits, with the whole stream (``keeps``).

    Args:
        model: used if the engine names none.
        stop_sequences: the request's.
        usage: of the prompt as it is planned, as a chat completion counts it; None if unknown.
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
        usage: Mapping[str, Any] | None = None,
    ) -> None:
        self._usage = usage
        self._before = before
        self._compaction = compaction
        self._alone = compaction is not None and compaction.paused
        self._id = message_id
        self._head = head
        self._model = model
        self._stops = stop_sequences
        self.started = False
        self.ended = False
        self._blocks: deque[_Block] = deque()
        """The open block, and those that wait."""
        self._of_calls: dict[int, _Block] = {}
        self._block = -1
        """Index of the open block."""
        self._calls = StreamedCalls()
        self._refused = False
        self._answer = StreamedAnswer()

    def feed(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events that a chunk adds.

        Raises:
            AnswerError: a call goes on after its end.
        """
        if not self.started:
            self.started = True
            yield self._start(chunk)
            yield {"type": "ping"}
            for block in self._before:
                yield self._begin(COMPACTION, {"content": None, "encrypted_content": None})
                yield self._added({**block, "type": "compaction_delta"})
                yield {"type": "content_block_stop", "index": self._block}
        delta = self._answer.read(chunk)
        if delta is not None and not self._alone:
            yield from self._delta(delta)

    def close(self) -> Iterator[Event]:
        """Yield the events that end the message, once.

        Raises:
            AnswerError: the engine never reported a finish reason, or never named a call.
        """
        if self.ended:
            return
        finish = self._answer.finish
        self.ended = True
        yield from self._written(last=True)
        calls = any(call.name for call in self._calls.calls)
        stop = stop_members(finish, self._stops, calls=calls, refused=self._refused)
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

    def _start(self, chunk: Mapping[str, Any]) -> Event:
        told = chunk.get("usage")
        usage = told if isinstance(told, Mapping) and told else self._usage
        counted = NO_TOKENS if usage is None or self._alone else map_usage(usage, None)
        message = {
            **message_head(self._id, chunk.get("model") or self._model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": {**counted, "output_tokens": 0},
            **self._head,
        }
        return {"type": "message_start", "message": message}

    def _delta(self, delta: Mapping[str, Any]) -> Iterator[Event]:
        refusal = text_or_none(delta.get("refusal")) or ""
        self._refused = self._refused or bool(refusal)
        said = (("thinking", reasoning_of(delta)), ("text", content_of(delta)), ("text", refusal))
        for kind, text in said:
            if text:
                yield from self._say(kind, text)
        for part in call_parts(delta):
            if isinstance(part, Mapping) and (taken := self._calls.take(part)) is not None:
                yield from self._call(*taken)

    def _say(self, kind: str, text: str) -> Iterator[Event]:
        if not self._blocks or self._blocks[-1].kind != kind:
            self._blocks.append(_Block(kind))
        self._blocks[-1].held.append(text)
        yield from self._written()

    def _call(self, call: StreamedCall, arguments: str) -> Iterator[Event]:
        block = self._of_calls.get(call.number)
        if block is None:
            block = self._of_calls[call.number] = _Block("tool_use", call)
            self._blocks.append(block)
        elif block.closed:
            if arguments.strip():
                raise AnswerError(MIXED)
            return
        if arguments:
            block.held.append(arguments)
        yield from self._written()

    def _written(self, *, last: bool = False) -> Iterator[Event]:
        """Yield what may be sent now.

        Args:
            last: True if nothing follows, so that every block is whole.
        """
        while self._blocks:
            block = self._blocks[0]
            call = block.call
            if not block.opened:
                if call is not None and not last and not (call.name and call.begun):
                    return
                if call is not None and not call.name:
                    if call.nameless:
                        raise AnswerError(NAMELESS)
                    self._close()
                    continue
                yield self._begin(block.kind, self._shown(block))
                block.opened = True
            if block.held:
                kind, name = _DELTAS[block.kind]
                yield self._added({"type": kind, name: "".join(block.held)})
                block.held.clear()
            if not last and (len(self._blocks) == 1 or (call is not None and not call.whole)):
                return
            if block.kind == "thinking":
                yield self._added({"type": "signature_delta", "signature": SIGNATURE})
            yield {"type": "content_block_stop", "index": self._block}
            self._close()

    def _close(self) -> None:
        self._blocks.popleft().closed = True

    def _shown(self, block: _Block) -> dict[str, Any]:
        """Return a block as it begins."""
        if block.call is None:
            return {"thinking": "", "signature": ""} if block.kind == "thinking" else {"text": ""}
        call = block.call
        return {"id": call.id or f"{self._id}-{call.number}", "name": call.name, "input": {}}

    def _begin(self, kind: str, block: Mapping[str, Any]) -> Event:
        self._block += 1
        content = {"type": kind, **block}
        return {"type": "content_block_start", "index": self._block, "content_block": content}

    def _added(self, delta: Mapping[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._block, "delta": delta}
