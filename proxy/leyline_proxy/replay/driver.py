"""Sends one recorded request with the OpenAI SDK and reads its account."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from .errors import AccountError, MissingExtraError, RequestRefusedError, StackError
from .results import RequestResult
from .traces import TraceRequest

if TYPE_CHECKING:
    from openai import OpenAI, Stream
    from openai.types.chat import ChatCompletionChunk, ChatCompletionMessage

SESSION_HEADER = "x-leyline-session"
TIMEOUT_S = 900.0


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
    ) -> None:
        """Connect to ``base_url`` (with its ``/v1``); without ``model``, use the first one served.

        Each request asks for ``policy``; None leaves it to the stack.

        Raises:
            MissingExtraError: the OpenAI SDK is not installed.
            StackError: nothing answers there, or it serves no model.
        """
        self._client = _sdk(base_url, api_key)
        self._extra_body = {"leyline": {"policy": policy}} if policy else None
        self.model = model or self._first_model(base_url)

    def send(self, request: TraceRequest, *, session: str, place: tuple[int, int]) -> RequestResult:
        """Send one request of a session; ``place`` is its (session, turn) in the trace.

        One token is generated and discarded.

        Raises:
            RequestRefusedError: refused with a 4xx status.
            StackError: a failure on the stack's side.
            AccountError: no receipt, or one that does not add up.
        """
        import openai

        started = time.perf_counter()
        try:
            stream = self._open(request, session)
            first, account = _read(stream)
        except openai.APIStatusError as error:
            if error.status_code < 500:
                raise RequestRefusedError(_refusal(error)) from error
            raise StackError(f"request {_spoken(place)}: {_refusal(error)}") from error
        except openai.APIError as error:
            raise StackError(f"request {_spoken(place)}: {error.message}") from error
        return _result(account, place, (first - started) * 1000)

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

    def _open(self, request: TraceRequest, session: str) -> Stream[ChatCompletionChunk]:
        stream = self._client.chat.completions.create(
            stream=True,
            stream_options={"include_usage": True},
            **self._members(request, session, max_tokens=1),
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
        except openai.APIError as error:
            raise StackError(f"no OpenAI-compatible service at {base_url}: {error}") from error
        if not models:
            raise StackError(f"the service at {base_url} lists no model")
        return models[0].id


def _sdk(base_url: str, api_key: str) -> OpenAI:
    try:
        import openai
    except ImportError as error:
        raise MissingExtraError("openai") from error
    return openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=TIMEOUT_S)


def _read(stream: Stream[ChatCompletionChunk]) -> tuple[float, Mapping[str, Any]]:
    """Return the time of the first token, and the ``leyline`` member of the finish chunk."""
    first: float | None = None
    account: Mapping[str, Any] | None = None
    for chunk in stream:
        if first is None and _bears_token(chunk):
            first = time.perf_counter()
        member = (chunk.model_extra or {}).get("leyline")
        account = member if isinstance(member, dict) else account
    if first is None:
        raise StackError("the stream ended without a token")
    if account is None:
        raise AccountError("the stream carries no receipt; is this address a Leyline proxy?")
    return first, account


def _bears_token(chunk: ChatCompletionChunk) -> bool:
    """Return True if the chunk has more than the opening one, which only names the role."""
    for choice in chunk.choices:
        delta = choice.delta
        extra = any((delta.model_extra or {}).values())  # reasoning, under several names
        if delta.content or delta.tool_calls or extra or choice.finish_reason:
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
