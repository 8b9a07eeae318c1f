"""Traces by OpenTelemetry's SDK. Imported only if tracing is on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from threading import Thread
from time import time_ns
from types import TracebackType
from urllib.parse import urlsplit

import structlog
from opentelemetry.context import Context, attach, detach
from opentelemetry.propagate import get_global_textmap
from opentelemetry.propagators.textmap import Getter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    Span,
    SpanKind,
    Status,
    StatusCode,
    format_trace_id,
    set_span_in_context,
)
from starlette.datastructures import Headers

from ...errors import LimitError, ProxyError
from .current import (
    Attribute,
    Attributes,
    Hop,
    RawHeaders,
    RequestTrace,
    Tracing,
    plain_code,
    serving,
)

log = structlog.get_logger("leyline.tracing")

MAX_EVENTS = 64
"""Largest number of events of one request."""

_TEXT_CHARS = 512
"""Longest text of an attribute without content."""
_CONTENT = frozenset({"gen_ai.input.messages"})
_MAX_PARENT, _MAX_BAGGAGE = 512, 8192
_BAGGAGE = "baggage"
_FAULT, _SERVER_FAULT = 400, 500


class OtelTracing(Tracing):
    """Traces for an OpenTelemetry processor.

    Args:
        provider: creates the spans; :meth:`aclose` closes it, too.
        content_chars: characters of messages in one span.
        flush_s: for the export of waiting spans at the end.
    """

    def __init__(
        self, provider: TracerProvider, *, content_chars: int = 0, flush_s: float = 5.0
    ) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("leyline")
        self._propagator = get_global_textmap()
        self._fields = _names(self._propagator.fields) - {_BAGGAGE.encode()}
        self._places: dict[str, Attributes] = {}
        self._content_chars = content_chars
        self._flush_s = flush_s

    @contextmanager
    def request(self, method: str, route: str, headers: Headers) -> Iterator[RequestTrace]:
        """Yield the trace of a request, which is current inside the block."""
        parent = self._propagator.extract(headers, Context(), _HeaderGetter())
        span = self._tracer.start_span(
            f"{method} {route}",
            context=parent,
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "http.route": route},
        )
        context = set_span_in_context(span, parent)
        recorded = span.is_recording()
        trace = _Recorded(self, span, context) if recorded else _Unrecorded(self, span, context)
        token = attach(context)
        try:
            with serving(trace):
                yield trace
        finally:
            detach(token)
            trace.close()

    async def aclose(self) -> None:
        """Export the waiting spans; those not exported in time are lost."""
        closing = Thread(target=self._provider.shutdown, name="leyline-traces", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, self._flush_s)
        if closing.is_alive():
            log.warning("traces_not_flushed", waited_s=self._flush_s)

    @property
    def content_chars(self) -> int:
        """Characters of messages in one span."""
        return self._content_chars

    def place(self, address: str) -> Attributes:
        """Return an engine's address as attributes; there are few engines."""
        found = self._places.get(address)
        if found is None:
            found = self._places[address] = _place(address)
        return found

    def start(self, name: str, context: Context, kind: SpanKind, attributes: Attributes) -> Span:
        """Start a span below another."""
        return self._tracer.start_span(name, context, kind, attributes)

    def hop(self, context: Context, span: Span | None) -> _TracedHop:
        """Return the upstream headers for a span, or for ``context`` if there is none."""
        carrier: dict[str, str] = {}
        here = context if span is None else set_span_in_context(span, context)
        self._propagator.inject(carrier, here)
        # The caller's header passes unchanged: written again, it would lose its properties.
        carrier.pop(_BAGGAGE, None)
        return _TracedHop(span, carrier, self._fields)


class _Unrecorded(RequestTrace):
    """A trace that isn't sampled: engines are informed, and logs have its id."""

    def __init__(self, tracing: OtelTracing, span: Span, context: Context) -> None:
        self._tracing = tracing
        self._context = context
        known = span.get_span_context()
        valid = known != INVALID_SPAN_CONTEXT
        self.trace_id = format_trace_id(known.trace_id) if valid else None

    @contextmanager
    def upstream(self, name: str, address: str) -> Iterator[Hop]:
        """Pass the trace on."""
        yield self._tracing.hop(self._context, None)

    def close(self) -> None:
        """Do nothing at the request's end."""


class _Recorded(RequestTrace):
    """A trace that is exported."""

    def __init__(self, tracing: OtelTracing, span: Span, context: Context) -> None:
        self._tracing = tracing
        self._span = span
        self._context = context
        self._upstream: Attributes = {}
        self._hop: Span | None = None
        self._hop_ended: int | None = None
        self._events = 0
        self.recording = True
        self.trace_id = format_trace_id(span.get_span_context().trace_id)
        self.content_chars = tracing.content_chars

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a span below the request's; called code may put its own spans below it."""
        if not self.recording:  # work that outlives its request
            return super().stage(name)
        span = self._tracing.start(name, self._context, SpanKind.INTERNAL, {})
        return _Inside(span, self._context)

    def describe(self, attributes: Attributes) -> None:
        """Add attributes to the request."""
        if self.recording:
            self._span.set_attributes(_clean(attributes))

    def describe_upstream(self, attributes: Attributes) -> None:
        """Set the attributes of later upstream requests."""
        self._upstream = _clean(attributes)

    def event(self, name: str, attributes: Attributes) -> None:
        """Record an event."""
        if self.recording and self._events < MAX_EVENTS:
            self._events += 1
            self._span.add_event(name, _clean(attributes))

    @contextmanager
    def upstream(self, name: str, address: str) -> Iterator[Hop]:
        """Open a span of the way to an engine, which goes upstream as the parent of its own."""
        self._end_hop()
        told = {**self._upstream, "leyline.upstream": name, **self._tracing.place(address)}
        span = self._tracing.start("upstream", self._context, SpanKind.CLIENT, told)
        self._hop, self._hop_ended = span, None
        token = attach(set_span_in_context(span, self._context))
        try:
            yield self._tracing.hop(self._context, span)
        except BaseException as error:
            _mark(span, error)
            raise
        finally:
            detach(token)
            # The engine's counts come a little later.
            self._hop_ended = time_ns()

    def described_answer(self, attributes: Attributes) -> None:
        """Record what the engine's answer is."""
        cleaned = _clean(attributes)
        if self._hop is not None:
            self._hop.set_attributes(cleaned)
        self.describe(cleaned)

    def answered(self, attributes: Attributes) -> None:
        """Record that the engine's answer is complete."""
        cleaned = _clean(attributes)
        if self._hop is not None:
            self._hop.set_attributes(cleaned)
        self._end_hop()
        self.describe(cleaned)

    def failed(self, error: ProxyError) -> None:
        """Record that the request has ended in an error."""
        code = plain_code(error.code)
        self.describe({"error.type": code})
        if error.status < _SERVER_FAULT or isinstance(error, LimitError):
            self.event("leyline.refusal", {"reason": code})

    def ended(self, status: str) -> None:
        """Record that the response has ended."""
        if not status.isdigit():
            self.describe({"error.type": status})
            return
        self.describe({"http.response.status_code": int(status)})
        if int(status) >= _SERVER_FAULT:
            self._span.set_status(Status(StatusCode.ERROR))

    def close(self) -> None:
        """End the request's span."""
        self._end_hop()
        self.recording = False
        self._span.end()

    def _end_hop(self) -> None:
        if self._hop is not None:
            self._hop.end(self._hop_ended)
            self._hop = None


class _Inside(AbstractContextManager[None]):
    """A span made current, for libraries that look for it; ends with the block."""

    __slots__ = ("_context", "_span", "_token")

    def __init__(self, span: Span, context: Context) -> None:
        self._span = span
        self._context = context

    def __enter__(self) -> None:
        self._token = attach(set_span_in_context(self._span, self._context))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        detach(self._token)
        if error is not None:
            _mark(self._span, error)
        self._span.end()


class _TracedHop(Hop):
    def __init__(
        self, span: Span | None, carrier: Mapping[str, str], replaced: frozenset[bytes]
    ) -> None:
        self._span = span
        self._replaced = replaced | _names(carrier)
        self.headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1", "replace"))
            for name, value in carrier.items()
        ]

    def theirs(self, headers: RawHeaders) -> RawHeaders:
        """Return the caller's headers, less those of its own span."""
        return [item for item in headers if item[0].lower() not in self._replaced]

    def answered(self, status: int) -> None:
        """Record that the engine has begun to answer."""
        if self._span is not None:
            self._span.set_attribute("http.response.status_code", status)
            if status >= _FAULT:
                self._span.set_attribute("error.type", str(status))
                self._span.set_status(Status(StatusCode.ERROR))


class _HeaderGetter(Getter[Headers]):
    """Reads a request's headers, but ignores overlong ones and contradictory parents."""

    def get(self, carrier: Headers, key: str) -> list[str] | None:
        """Return the values of a header, or None."""
        found = carrier.getlist(key)
        if not found:
            return None
        if key == "traceparent":
            return found if len(found) == 1 and len(found[0]) <= _MAX_PARENT else None
        # The state is exported with every span of the request.
        limit = _MAX_PARENT if key == "tracestate" else _MAX_BAGGAGE
        return found if sum(map(len, found)) <= limit else None

    def keys(self, carrier: Headers) -> list[str]:
        """Return the names of all headers."""
        return list(carrier.keys())


def _mark(span: Span, error: BaseException) -> None:
    """Record the error that ended a span. Never its message, which may quote the request."""
    if not span.is_recording():
        return
    code = getattr(error, "code", None)
    name = plain_code(code) if isinstance(code, str) else type(error).__name__
    span.set_attribute("error.type", name)
    if isinstance(error, Exception):
        span.set_status(Status(StatusCode.ERROR))


def _names(names: Iterable[str]) -> frozenset[bytes]:
    return frozenset(name.lower().encode("latin-1") for name in names)


def _place(address: str) -> dict[str, Attribute]:
    parts = urlsplit(address)
    place: dict[str, Attribute] = {}
    if parts.hostname:
        place["server.address"] = parts.hostname
    if parts.port:
        place["server.port"] = parts.port
    return place


def _clean(attributes: Attributes) -> dict[str, Attribute]:
    """Return attributes fit for export: one text that isn't UTF-8 would lose a whole batch."""
    return {name: _cleaned(name, value) for name, value in attributes.items()}


def _cleaned(name: str, value: Attribute) -> Attribute:
    if not isinstance(value, str):
        return value
    cut = value if name in _CONTENT else value[:_TEXT_CHARS]
    return cut if cut.isascii() else cut.encode("utf-8", "replace").decode()
