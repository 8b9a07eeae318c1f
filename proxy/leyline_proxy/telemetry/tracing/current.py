"""The trace of the current request, as the serving code sees it.

It belongs to the context, which tasks and worker threads inherit. Without tracing it is one that
records nothing, and costs a look-up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from starlette.datastructures import Headers

from ...errors import ProxyError

_PLAIN_CODE = re.compile(r"[A-Za-z0-9_.:-]{1,64}")

Attribute = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Attribute]
RawHeaders = Sequence[tuple[bytes, bytes]]
_NOTHING = nullcontext()


def plain_code(code: str) -> str:
    """Return an error's code if it is plain; engines may write anything there."""
    return code if _PLAIN_CODE.fullmatch(code) else "other"


class Hop:
    """The way to an engine and back; this class traces nothing."""

    headers: RawHeaders = ()
    """Headers that go upstream for it."""

    def theirs(self, headers: RawHeaders) -> RawHeaders:
        """Return the caller's headers, less those that :attr:`headers` replaces."""
        return headers

    def answered(self, status: int) -> None:
        """Note that the engine has begun to answer."""


_UNTRACED = nullcontext(Hop())


class RequestTrace:
    """The trace of one request; this class records nothing."""

    recording = False
    """True if attributes are recorded."""
    trace_id: str | None = None
    """32 hexadecimal digits."""
    content_chars = 0
    """Largest number of characters of prompt text that it may hold."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a span of a part of the work."""
        return _NOTHING

    def describe(self, attributes: Attributes) -> None:
        """Add attributes to the request."""

    def describe_upstream(self, attributes: Attributes) -> None:
        """Set the attributes of later upstream requests."""

    def event(self, name: str, attributes: Attributes) -> None:
        """Record an event."""

    def upstream(self, name: str, address: str) -> AbstractContextManager[Hop]:
        """Return a span of the way to an engine.

        Args:
            name: the engine's.
            address: its URL.
        """
        return _UNTRACED

    def described_answer(self, attributes: Attributes) -> None:
        """Add attributes of the engine's answer, to the request and to the upstream span."""

    def answered(self, attributes: Attributes) -> None:
        """End the upstream span when the engine's answer is complete, before everything closes."""

    def failed(self, error: ProxyError) -> None:
        """Record that the request has ended in an error."""

    def ended(self, status: str) -> None:
        """Record that the response has ended.

        Args:
            status: of HTTP, or a word for another end.
        """


_CURRENT: ContextVar[RequestTrace] = ContextVar("leyline_trace", default=RequestTrace())  # noqa: B039 - it has no state


class Tracing:
    """Begins traces; this class begins none."""

    @contextmanager
    def request(self, method: str, route: str, headers: Headers) -> Iterator[RequestTrace]:
        """Yield the trace of a request, which is current inside the block."""
        yield current_trace()

    async def aclose(self) -> None:
        """Export the waiting spans, within a short time."""


def current_trace() -> RequestTrace:
    """Return the trace of the current request."""
    return _CURRENT.get()


def current_trace_id() -> str | None:
    """Return the id of the current trace, if it is recorded."""
    trace = _CURRENT.get()
    return trace.trace_id if trace.recording else None


def stage_span(name: str) -> AbstractContextManager[None]:
    """Return a span of a stage of the current request."""
    return _CURRENT.get().stage(name)


@contextmanager
def serving(trace: RequestTrace) -> Iterator[RequestTrace]:
    """Make a trace the current one."""
    token = _CURRENT.set(trace)
    try:
        yield trace
    finally:
        _CURRENT.reset(token)
