"""HTTP to the engine: requests, withheld headers, and the blame for failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec

from leyline_engine.contract import (
    CAPABILITY_PATH,
    CLAIMS_PATH,
    RECEIPT_PATH,
    RENDERER_PATH,
    SIGNATURE_HEADER,
    TOKENIZE_PATH,
    Capability,
    ChatDialect,
    ClaimCommand,
    ClaimReply,
    TurnRecord,
    sign_bytes,
)

from ..bounded_body import BodyTooLongError, bounded_body
from ..errors import (
    AnswerTooLargeError,
    ProxyError,
    UnsupportedError,
    UpstreamBusyError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
)
from .headers import RawHeaders, upstream_headers
from .link import Link
from .tls_faults import tls_problem

T = TypeVar("T")

GATEWAY_FAILURES = frozenset({502, 503, 504})
"""Statuses by which a server, or a gateway in front of it, reports that it can't serve now."""

_NO_ANSWER = frozenset({401, 403, 408, 425, 429, 500, 502, 504})  # its KV may still be there

_BUSY = "All connections to the engine are in use (max_upstream_connections)."
_SIDE_BUSY = "The engine leaves too many small questions unanswered."

_BOUNDS = "leyline.answer_bounds"
_IDLE = "leyline.idle_timeout_s"
"""Names in a request's extensions."""


@dataclass(frozen=True, slots=True)
class AnswerBounds:
    """Largest numbers of bytes of an engine's answer kept at a time."""

    answer: int = 64 * 1024 * 1024
    """Bytes of an answer that is read whole."""
    event: int = 8 * 1024 * 1024
    """Bytes of one event of a stream."""


def bounds_of(response: httpx.Response) -> AnswerBounds:
    """Return the bounds of a response."""
    found = response.request.extensions.get(_BOUNDS)
    return found if isinstance(found, AnswerBounds) else AnswerBounds()


@dataclass(frozen=True, slots=True)
class ModelList:
    """The models that an engine reports to serve."""

    ids: tuple[str, ...]
    owners: frozenset[str]


@dataclass(frozen=True, slots=True)
class NoCapability:
    """The engine gave no capability document."""

    why: str
    settled: bool
    """False if the same request may soon get another answer."""


class RendererDocument(msgspec.Struct, frozen=True):
    """The engine's description of its own chat rendering."""

    chat_template: str
    """Jinja source; empty if the engine renders in another way."""
    special_tokens: dict[str, str]
    tokenizer_json: str
    dialect: str = ChatDialect.LEYLINE
    takes_parts: bool | None = None
    """True if the template takes lists of parts; None leaves it to the template's source."""
    template_kwargs: dict[str, Any] = {}
    """Template options for requests without any."""
    withholds_tools: bool = False
    """True if the prompt of a request with ``tool_choice: none`` has no tools."""
    tokens_path: str = TOKENIZE_PATH
    """Path of the engine's own tokens of a chat request."""


class UpstreamClient:
    """One engine. All methods raise only the errors of :mod:`leyline_proxy.errors`.

    Args:
        link: its read timeout is the time to the first byte.
        side: for small documents and commands, so callers' requests can't keep them from a
            connection; None uses ``link`` for them, too.
        reserved: names of headers, in lower case, that callers' requests can't send upstream.
        small_timeout_s: for small documents, not completions.
        idle_timeout_s: between two chunks of an answer; None leaves that to ``link``.
        bounds: of its answers.
        peer: the server's name in messages: a router may be in front of the engine.
    """

    def __init__(
        self,
        link: Link,
        *,
        api_key: str | None,
        side: Link | None = None,
        reserved: frozenset[bytes] = frozenset(),
        hints_secret: str | None = None,
        small_timeout_s: float = 10.0,
        idle_timeout_s: float | None = None,
        bounds: AnswerBounds | None = None,
        peer: str = "engine",
    ) -> None:
        self._link = link
        self._side = side or link
        self._reserved = reserved
        self._api_key = api_key
        self._peer = peer
        self._hints_secret = hints_secret
        self._small_timeout_s = small_timeout_s
        self._extensions = {_IDLE: idle_timeout_s, _BOUNDS: bounds or AnswerBounds()}

    @property
    def key_headers(self) -> RawHeaders:
        """The proxy's own key in the form of Anthropic's API; empty without a key."""
        return [(b"x-api-key", self._api_key.encode())] if self._api_key is not None else []

    @property
    def small_timeout_s(self) -> float:
        """Timeout for small documents."""
        return self._small_timeout_s

    @property
    def address(self) -> str:
        """The engine's address, without credentials."""
        return self._link.address

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        headers: RawHeaders,
        content: bytes = b"",
        timeout_s: float | None = None,
        own: RawHeaders = (),
        credentials: bool = False,
    ) -> AsyncIterator[httpx.Response]:
        """Open a response without reading its body; close it on exit.

        Args:
            headers: the caller's, some of which are withheld.
            timeout_s: replaces all of the link's own timeouts; for small documents.
            own: the proxy's headers, which replace the caller's of the same names.
            credentials: True if the caller's own credentials replace the proxy's.

        Raises:
            UpstreamUnreachableError: no connection, or it broke.
            UpstreamTimeoutError: the engine was too slow.
        """
        link = self._link if timeout_s is None else self._side
        ours = self._reserved.union(name.lower() for name, _ in own)
        theirs = [item for item in headers if item[0].lower() not in ours]
        with _faults(_BUSY if timeout_s is None else _SIDE_BUSY, self._peer):
            response = await link.send(
                method,
                path,
                headers=[*upstream_headers(theirs, self._api_key, credentials=credentials), *own],
                content=content,
                timeout_s=timeout_s,
                extensions=self._extensions,
            )
        try:
            yield response
        finally:
            await response.aclose()

    async def get(self, path: str) -> httpx.Response:
        """Return a small document, read whole. Raises as :meth:`open`."""
        async with self.open("GET", path, headers=(), timeout_s=self._small_timeout_s) as response:
            await read(response)
            return response

    async def models(self) -> ModelList | None:
        """Return the models that the engine serves, or None if it doesn't report them.

        Raises:
            UpstreamUnreachableError: also if a gateway reports that it has no engine.
        """
        response = await self.get("/v1/models")
        if response.status_code in GATEWAY_FAILURES:
            raise UpstreamUnreachableError(
                f"The list of models was answered with status {response.status_code}."
            )
        if response.status_code != httpx.codes.OK:
            return None
        try:
            listed = response.json()["data"]
            ids = tuple(str(item["id"]) for item in listed)
            return ModelList(ids, frozenset(str(item.get("owned_by", "")) for item in listed))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    async def capability(self) -> Capability | NoCapability:
        """Return the engine's capability document, or the reason for its absence. Never raises.

        Other servers answer an unknown path in many ways, or not at all.
        """
        try:
            response = await self.get(CAPABILITY_PATH)
        except ProxyError as error:
            return NoCapability(f"no capability document: {error.message}", settled=False)
        status = response.status_code
        if status == httpx.codes.SERVICE_UNAVAILABLE:
            return NoCapability("the engine hasn't said yet what it can do", settled=False)
        if status != httpx.codes.OK:
            return NoCapability(
                f"the engine has no Leyline capability document (status {status})",
                settled=status not in _NO_ANSWER,
            )
        document = _document(response, Capability)
        if document is None:
            return NoCapability("the engine's capability document can't be read", settled=True)
        return document

    async def renderer(self) -> RendererDocument | None:
        """Return the engine's chat template and tokenizer, or None if it doesn't give them."""
        return _document(await self.get(RENDERER_PATH), RendererDocument)

    async def complete(self, body: Mapping[str, Any], timeout_s: float | None = None) -> str | None:
        """Return the text of the engine's answer to a chat request; None on a refusal.

        Args:
            timeout_s: see :meth:`open`.
        """
        async with self.open(
            "POST",
            "/v1/chat/completions",
            headers=[(b"content-type", b"application/json")],
            content=msgspec.json.encode(body),
            timeout_s=timeout_s,
        ) as response:
            await read(response)
        if response.status_code != httpx.codes.OK:
            return None
        try:
            text = response.json()["choices"][0]["message"]["content"]
        except (ValueError, KeyError, TypeError, IndexError):
            return None
        return text if isinstance(text, str) and text.strip() else None

    async def record(self, message_id: str) -> TurnRecord | None:
        """Return the record of a request, or None if the engine has none."""
        return _document(await self.get(RECEIPT_PATH.format(message_id=message_id)), TurnRecord)

    async def claims(self, command: ClaimCommand) -> ClaimReply:
        """Return the engine's answer to a command about claims, with any refusal in ``problem``.

        Raises:
            UnsupportedError: the engine takes no claims.
        """
        response = await self.answer_to_claims(msgspec.json.encode(command), self._hints_secret)
        if response.status_code in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
            raise no_claims()
        reply = _document(response, ClaimReply)
        if reply is None:
            refused = response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
            hint = " Do proxy and engine have the same hints_secret?" if refused else ""
            raise UpstreamUnreachableError(
                f"The engine gave no account of a claim (status {response.status_code}).{hint}",
                code="upstream_error",
            )
        return reply

    async def answer_to_claims(
        self, body: bytes, secret: str | None, path: str = CLAIMS_PATH
    ) -> httpx.Response:
        """Return the engine's answer to an encoded command, about claims. Raises as :meth:`open`.

        Args:
            secret: signs the command; None leaves it unsigned.
        """
        own = [(b"content-type", b"application/json")]
        if secret is not None:
            own.append((SIGNATURE_HEADER.encode(), sign_bytes(body, secret).encode()))
        async with self.open(
            "POST", path, headers=(), own=own, content=body, timeout_s=self._small_timeout_s
        ) as response:
            await read(response)
            return response

    async def aclose(self) -> None:
        """Close all connections."""
        await self._link.aclose()
        await self._side.aclose()


async def read(response: httpx.Response) -> bytes:
    """Return the whole body of an open response, which also keeps it.

    Raises:
        AnswerTooLargeError: it is longer than its bounds, compressed or not.
        ProxyError: as :meth:`UpstreamClient.open`.
    """
    limit = bounds_of(response).answer
    with _faults():
        try:
            response._content = await bounded_body(response, limit)  # as its own aread() does
        except BodyTooLongError as error:
            raise AnswerTooLargeError(
                f"The engine's answer is longer than {limit} bytes (max_answer_bytes)."
            ) from error
    return response.content


async def chunks(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Yield the body's bytes as they arrive. Raises as :meth:`UpstreamClient.open`."""
    idle_s = response.request.extensions.get(_IDLE)
    with _faults():
        received = response.aiter_raw()
        try:
            # The link bounds the first wait: for the first token.
            yield await anext(received)
            while True:
                # Bound only the wait: the caller's time for a chunk isn't the engine's.
                async with asyncio.timeout(idle_s):
                    chunk = await anext(received)
                yield chunk
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise UpstreamTimeoutError(
                f"The engine fell silent in its answer for more than {idle_s:g} s.",
                code="upstream_idle",
            ) from error


def no_claims() -> UnsupportedError:
    """Return the error for an engine that takes no claims."""
    return UnsupportedError("This engine takes no claims.", code="claims_unsupported")


class _faults:  # noqa: N801 - a context manager used like a function
    """Turns httpx's errors into the proxy's.

    Args:
        busy: message if no connection became free.
    """

    def __init__(self, busy: str = _BUSY, peer: str = "engine") -> None:
        self._busy = busy
        self._peer = peer

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.PoolTimeout):
            if isinstance(error, httpx.ConnectTimeout):
                raise UpstreamUnreachableError(
                    f"The {self._peer} can't be reached in time."
                ) from error
            raise UpstreamTimeoutError("The engine didn't answer in time.") from error
        if isinstance(error, httpx.PoolTimeout):
            raise UpstreamBusyError(self._busy) from error
        if isinstance(error, httpx.TransportError):
            reason = tls_problem(error) or type(error).__name__
            raise UpstreamUnreachableError(
                f"The {self._peer} can't be reached ({reason})."
            ) from error
        if isinstance(error, httpx.StreamError | httpx.DecodingError):
            raise UpstreamUnreachableError("The engine broke off its answer.") from error


def _document(response: httpx.Response, kind: type[T]) -> T | None:
    if response.status_code != httpx.codes.OK:
        return None
    try:
        return msgspec.json.decode(response.content, type=kind)
    except msgspec.DecodeError:
        return None
