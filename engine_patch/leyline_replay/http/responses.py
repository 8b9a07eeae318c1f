"""Answers in OpenAI's shapes, whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from leyline_engine.contract import Receipt
from leyline_replay.generation import FinishEvent
from leyline_replay.text.sampling import SampledToken
from leyline_replay.text.tool_calls import ToolCall, ToolCallParser, ToolOutput

TokenText = Callable[[int], str]
Json = dict[str, Any]


def usage(receipt: Receipt, completion_tokens: int) -> Json:
    """Return OpenAI's usage object; cached tokens are those that weren't prefilled."""
    tokens = receipt.tokens
    return {
        "prompt_tokens": tokens.prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": tokens.prompt + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": tokens.served},
    }


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that all chunks of one answer share."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, kind: str, **members: Any) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            **members,
        }


class ChatShape:
    """``chat.completion`` and its chunks."""

    def __init__(self, head: Head, token_text: TokenText, *, parse_tools: bool) -> None:
        self._head = head
        self._token_text = token_text
        self._tools = ToolCallParser() if parse_tools else None
        self._calls = 0

    def opening(self) -> Json:
        """Return the chunk that names the role."""
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, text: str, tokens: Sequence[SampledToken]) -> list[Json]:
        """Return chunks for new text: content, then complete tool calls."""
        output = self._split(text)
        return self._deltas(output, tokens)

    def closing(self, finish: FinishEvent) -> list[Json]:
        """Return chunks that end the answer: text that was held back, then the finish reason."""
        chunks = self._deltas(ToolOutput(self._tools.flush() if self._tools else ""), ())
        return [*chunks, self._chunk({}, finish_reason=self._reason(finish))]

    def usage_chunk(self, finish: FinishEvent) -> Json:
        """Return the extra chunk of ``stream_options.include_usage``."""
        amounts = usage(finish.record.receipt, finish.completion_tokens)
        return self._head.wrap("chat.completion.chunk", choices=[], usage=amounts)

    def whole(self, text: str, tokens: Sequence[SampledToken], finish: FinishEvent) -> Json:
        """Return the answer as one object."""
        output = self._split(text)
        content = output.text + (self._tools.flush() if self._tools else "")
        self._calls = len(output.calls)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if output.calls:
            message["content"] = content or None
            message["tool_calls"] = [_call(call) for call in output.calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": self._reason(finish),
        }
        amounts = usage(finish.record.receipt, finish.completion_tokens)
        return self._head.wrap("chat.completion", choices=[choice], usage=amounts)

    def _split(self, text: str) -> ToolOutput:
        return self._tools.feed(text) if self._tools else ToolOutput(text)

    def _deltas(self, output: ToolOutput, tokens: Sequence[SampledToken]) -> list[Json]:
        chunks: list[Json] = []
        if output.text or tokens:
            logprobs = self._logprobs(tokens)
            chunks.append(self._chunk({"content": output.text}, logprobs=logprobs))
        for call in output.calls:
            delta = {"tool_calls": [{"index": self._calls, **_call(call)}]}
            chunks.append(self._chunk(delta))
            self._calls += 1
        return chunks

    def _reason(self, finish: FinishEvent) -> str:
        stopped = finish.reason.value == "stop"
        return "tool_calls" if self._calls and stopped else finish.reason.value

    def _chunk(
        self, delta: Json, *, finish_reason: str | None = None, logprobs: Any = None
    ) -> Json:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._head.wrap("chat.completion.chunk", choices=[choice])

    def _logprobs(self, tokens: Sequence[SampledToken]) -> Json | None:
        if not tokens:
            return None
        return {"content": [self._logprob(token) for token in tokens], "refusal": None}

    def _logprob(self, sampled: SampledToken) -> Json:
        top = [self._token(entry.token, entry.logprob) for entry in sampled.top]
        return {**self._token(sampled.token, sampled.logprob or 0.0), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> Json:
        text = self._token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class CompletionShape:
    """``text_completion``, whole and in chunks."""

    def __init__(self, head: Head, token_text: TokenText) -> None:
        self._head = head
        self._token_text = token_text
        self._offset = 0

    def opening(self) -> Json | None:
        """Return None: completions have no role to name."""
        return None

    def piece(self, text: str, tokens: Sequence[SampledToken]) -> list[Json]:
        return [self._wrap(text, tokens, None)] if text else []

    def closing(self, finish: FinishEvent) -> list[Json]:
        return [self._wrap("", (), finish.reason.value)]

    def usage_chunk(self, finish: FinishEvent) -> Json:
        amounts = usage(finish.record.receipt, finish.completion_tokens)
        return self._head.wrap("text_completion", choices=[], usage=amounts)

    def whole(self, text: str, tokens: Sequence[SampledToken], finish: FinishEvent) -> Json:
        answer = self._wrap(text, tokens, finish.reason.value)
        answer["usage"] = usage(finish.record.receipt, finish.completion_tokens)
        return answer

    def _wrap(self, text: str, tokens: Sequence[SampledToken], reason: str | None) -> Json:
        choice = {
            "index": 0,
            "text": text,
            "logprobs": self._logprobs(tokens),
            "finish_reason": reason,
        }
        return self._head.wrap("text_completion", choices=[choice])

    def _logprobs(self, tokens: Sequence[SampledToken]) -> Json | None:
        if not tokens:
            return None
        texts = [self._token_text(sampled.token) for sampled in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [sampled.logprob for sampled in tokens],
            "top_logprobs": [
                {self._token_text(entry.token): entry.logprob for entry in sampled.top}
                for sampled in tokens
            ],
            "text_offset": offsets,
        }


class NativeShape:
    """The answer of SGLang's ``/generate``, with every token that was sampled.

    Args:
        stop_tokens: tokens that end an answer; they are among the output.
    """

    def __init__(self, stop_tokens: frozenset[int]) -> None:
        self._stop_tokens = stop_tokens

    def whole(self, text: str, tokens: Sequence[SampledToken], finish: FinishEvent) -> Json:
        """Return the answer as one object."""
        output = [sampled.token for sampled in tokens]
        reason: Json = {"type": finish.reason.value}
        if output and output[-1] in self._stop_tokens:
            reason["matched"] = output[-1]
        counts = finish.record.receipt.tokens
        meta: Json = {
            "id": finish.record.receipt.message_id,
            "finish_reason": reason,
            "prompt_tokens": counts.prompt,
            "completion_tokens": len(output),
            "cached_tokens": counts.served,
            "output_token_logprobs": [(each.logprob, each.token, None) for each in tokens],
            "output_top_logprobs": [
                [(entry.logprob, entry.token, None) for entry in each.top] for each in tokens
            ],
        }
        return {"text": text, "output_ids": output, "meta_info": meta}


class WholeShape(Protocol):
    """An answer as one object."""

    def whole(self, text: str, tokens: Sequence[SampledToken], finish: FinishEvent) -> Json:
        """Return the answer."""


Shape = ChatShape | CompletionShape


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
