"""Sends one recorded request with the OpenAI SDK and reads its account."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..errors import AccountError, RequestRefusedError, StackError
from ..traces.recordings import TraceRequest
from .results import RequestResult

if TYPE_CHECKING:
    from openai import OpenAI, Stream
    from openai.types.chat import ChatCompletionChunk, ChatCompletionMessage
    from openai.types.chat.chat_completion_chunk import Choice

SESSION_HEADER = "x-leyline-session"
TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """One answer with its account."""

    message: Mapping[str, Any]
    """In the form in which a client sends it back."""
    result: RequestResult
    generated: int
    """Tokens of the answer, its end included."""
    chosen: tuple[str, ...] = ()
    """Texts of the generated tokens; only if log probabilities were asked for."""
    top: tuple[Mapping[str, float], ...] = ()
    """Log probabilities by text of the likeliest tokens, for each generated one."""


class Driver(Protocol):
    """The client interface that a replay needs."""

    def send(self, request: TraceRequest, *, session: str, place: tuple[int, int]) -> RequestResult:
        """See :meth:`ChatDriver.send`."""
        ...


class ChatDriver:
    """A chat client of one stack."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "replay",
        model: str | None = None,
        policy: str | None = None,
        members: Mapping[str, Any] | None = None,
    ) -> None:
        """Connect to ``base_url`` (with its ``/v1``); without ``model``, use the first one served.

        Each request asks for ``policy``; None leaves it to the stack. It also has ``members``.

        Raises:
            StackError: nothing answers there, or it serves no model.
        """
        self._client = _sdk(base_url, api_key)
        self._extra_body = {
            **(members or {}),
            **({"leyline": {"policy": policy}} if policy else {}),
        }
        self.model = model or self._first_model(base_url)

    def send(self, request: TraceRequest, *, session: str, place: tuple[int, int]) -> RequestResult:
        """Send one request of a session; ``place`` is its (session, turn) in the trace.

        One token is generated and discarded.

        Raises:
            RequestRefusedError: refused with a 4xx status.
            StackError: a failure on the stack's side.
            AccountError: no receipt, or one that does not add up.
        """
        return self.ask(request, session=session, place=place, max_tokens=1).result

    def ask(
        self,
        request: TraceRequest,
        *,
        session: str,
        place: tuple[int, int],
        max_tokens: int,
        logprobs: int = 0,
    ) -> StreamedAnswer:
        """Send one request as :meth:`send` does; return the answer, greedily decoded.

        Args:
            logprobs: number of likeliest tokens to report for each generated one.

        Raises as :meth:`send`.
        """
        import openai

        wanted = {"logprobs": True, "top_logprobs": logprobs} if logprobs else {}
        started = time.perf_counter()
        try:
            answer = _read(self._open(request, session, max_tokens, wanted))
        except openai.APIStatusError as error:
            if error.status_code < 500:
                raise RequestRefusedError(_refusal(error)) from error
            raise StackError(f"request {_spoken(place)}: {_refusal(error)}") from error
        except openai.APIError as error:
            raise StackError(f"request {_spoken(place)}: {error.message}") from error
        if answer.first is None:
            raise StackError("the stream ended without a token")
        if answer.account is None:
            raise AccountError("the stream carries no receipt; is this address a Leyline proxy?")
        result = _result(answer.account, place, (answer.first - started) * 1000)
        return StreamedAnswer(
            answer.message(), result, answer.generated, tuple(answer.chosen), tuple(answer.top)
        )

    def answer(
        self, request: TraceRequest, *, session: str, max_tokens: int
    ) -> ChatCompletionMessage:
        """Return the model's answer to a request, greedily decoded.

        Raises:
            StackError: refused, or a failure on the stack's side.
        """
        import openai

        try:
            completion = self._client.chat.completions.create(
                **self._members(request, session, max_tokens)
            )
        except openai.APIStatusError as error:
            raise StackError(f"session {session}: {_refusal(error)}") from error
        except openai.APIError as error:
            raise StackError(f"session {session}: {error.message}") from error
        return cast("ChatCompletionMessage", completion.choices[0].message)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _open(
        self, request: TraceRequest, session: str, max_tokens: int, wanted: Mapping[str, Any]
    ) -> Stream[ChatCompletionChunk]:
        stream = self._client.chat.completions.create(
            stream=True,
            stream_options={"include_usage": True},
            **self._members(request, session, max_tokens),
            **wanted,
        )
        return cast("Stream[ChatCompletionChunk]", stream)

    def _members(self, request: TraceRequest, session: str, max_tokens: int) -> dict[str, Any]:
        tools: dict[str, Any] = {"tools": list(request.tools)} if request.tools else {}
        return tools | {
            "model": self.model,
            "messages": list(request.messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "extra_headers": {SESSION_HEADER: session},
            "extra_body": self._extra_body,
        }

    def _first_model(self, base_url: str) -> str:
        import openai

        try:
            models = list(self._client.models.list())
        except openai.AuthenticationError as error:
            raise StackError(f"{base_url} needs a key: give it by --api-key") from error
        except openai.APIError as error:
            raise StackError(f"no OpenAI-compatible service at {base_url}: {error}") from error
        if not models:
            raise StackError(f"the service at {base_url} lists no model")
        return models[0].id


def _sdk(base_url: str, api_key: str) -> OpenAI:
    import openai

    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=TIMEOUT_S)


@dataclass(slots=True)
class _Arriving:
    """An answer in pieces."""

    first: float | None = None
    """Time of the first token."""
    account: Mapping[str, Any] | None = None
    """The ``leyline`` member of the finish chunk."""
    generated: int = 0
    texts: dict[str, str] = field(default_factory=dict)
    """Content and reasoning."""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    chosen: list[str] = field(default_factory=list)
    top: list[Mapping[str, float]] = field(default_factory=list)

    def add(self, choice: Choice) -> None:
        """Take a choice's next piece."""
        extra = choice.delta.model_extra or {}
        said = {
            "content": choice.delta.content,
            "reasoning_content": extra.get("reasoning_content"),
        }
        for name, piece in said.items():
            if piece:
                self.texts[name] = self.texts.get(name, "") + piece
        for delta in choice.delta.tool_calls or ():
            call = self.calls.setdefault(delta.index, {"id": "", "name": "", "arguments": ""})
            call["id"] += delta.id or ""
            if delta.function is not None:
                call["name"] += delta.function.name or ""
                call["arguments"] += delta.function.arguments or ""
        for token in (choice.logprobs.content if choice.logprobs else None) or ():
            self.chosen.append(token.token)
            self.top.append({each.token: each.logprob for each in token.top_logprobs})

    def message(self) -> dict[str, Any]:
        """Return what came as a message of the assistant."""
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for _, call in sorted(self.calls.items())
        ]
        message: dict[str, Any] = {"role": "assistant", "content": "", **self.texts}
        return message | ({"tool_calls": calls} if calls else {})


def _read(stream: Stream[ChatCompletionChunk]) -> _Arriving:
    arriving = _Arriving()
    for chunk in stream:
        if arriving.first is None and _bears_token(chunk):
            arriving.first = time.perf_counter()
        for choice in chunk.choices:
            arriving.add(choice)
        if chunk.usage is not None:
            arriving.generated = chunk.usage.completion_tokens
        member = (chunk.model_extra or {}).get("leyline")
        arriving.account = member if isinstance(member, dict) else arriving.account
    return arriving


def _bears_token(chunk: ChatCompletionChunk) -> bool:
    """Return True if the chunk has more than the opening one, which only names the role."""
    for choice in chunk.choices:
        delta = choice.delta
        extra = any((delta.model_extra or {}).values())  # reasoning, under several names
        tokens = choice.logprobs is not None and choice.logprobs.content
        if delta.content or delta.tool_calls or extra or tokens or choice.finish_reason:
            return True
    return False


def _result(account: Mapping[str, Any], place: tuple[int, int], ttft_ms: float) -> RequestResult:
    tokens = account.get("tokens")
    if not isinstance(tokens, dict):
        raise AccountError(f"request {_spoken(place)}: the receipt counts no tokens")
    result = RequestResult(
        session=place[0],
        turn=place[1],
        prompt=int(tokens["prompt"]),
        cached=int(tokens["prefix"]),
        spliced=int(tokens["spliced"]),
        reused=int(tokens.get("reused", 0)),  # proxies before reuse don't count it
        prefilled=int(tokens["prefilled"]),
        ttft_ms=round(ttft_ms, 3),
        reason=account.get("reason"),
    )
    if result.served + result.prefilled != result.prompt or not result.prompt:
        raise AccountError(
            f"request {_spoken(place)}: {result.cached} cached + {result.spliced} spliced + "
            f"{result.reused} reused + {result.prefilled} prefilled are not the prompt's "
            f"{result.prompt} tokens"
        )
    return result


def _refusal(error: Any) -> str:
    body = error.body if isinstance(error.body, dict) else {}
    return f"HTTP {error.status_code}: {body.get('message') or error.message}"


def _spoken(place: tuple[int, int]) -> str:
    return f"{place[1] + 1} of session {place[0] + 1}"
