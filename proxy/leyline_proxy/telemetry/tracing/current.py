"""The trace of the request that is being served: what the code that serves it sees of tracing.

It belongs to the context, which tasks and worker threads inherit. Without tracing it is one that
records nothing, and costs a look-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from starlette.datastructures import Headers

from ...errors import ProxyError

Attribute = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Attribute]

RawHeaders = Sequence[tuple[bytes, bytes]]

_NOTHING = nullcontext()


class Hop:
    """The way to an engine and back; this one isn't traced."""

    headers: RawHeaders = ()
    """What goes upstream for it."""

    def theirs(self, headers: RawHeaders) -> RawHeaders:
        """The caller's headers, less those that :attr:`headers` replaces."""
        return headers

    def answered(self, status: int) -> None:
        """The engine has begun to answer."""


_UNTRACED = nullcontext(Hop())


class RequestTrace:
    """The trace of one request; this one records nothing."""

    recording = False
    """Whether it is worth making attributes for."""
    trace_id: str | None = None
    """32 hexadecimal digits."""
    content_chars = 0
    """How much prompt text it may hold."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """A span of a part of the work."""
        return _NOTHING

    def describe(self, attributes: Attributes) -> None:
        """Add attributes to the request."""

    def describe_upstream(self, attributes: Attributes) -> None:
        """The attributes of what goes upstream from here on."""

    def event(self, name: str, attributes: Attributes) -> None:
        """Note that something happened."""

    def upstream(self, name: str, address: str) -> AbstractContextManager[Hop]:
        """A span of the way to an engine.

        Args:
            name: the engine's.
            address: its URL.
        """
        return _UNTRACED

    def answered(self, attributes: Attributes) -> None:
        """The engine's answer is complete: the way to it ends here, whatever is still to close."""

    def failed(self, error: ProxyError) -> None:
        """The request has ended in an error."""

    def ended(self, status: str) -> None:
        """The response has ended.

        Args:
            status: of HTTP, or a word for what came instead.
        """


_CURRENT: ContextVar[RequestTrace] = ContextVar("leyline_trace", default=RequestTrace())  # noqa: B039 - it has no state


class Tracing:
    """Begins traces; this one doesn't."""

    @contextmanager
    def request(self, method: str, route: str, headers: Headers) -> Iterator[RequestTrace]:
        """The trace of a request, the current one inside."""
        yield current_trace()

    async def aclose(self) -> None:
        """Export what waits, as far as that goes soon."""


def current_trace() -> RequestTrace:
    """The trace of the request that this code serves."""
    return _CURRENT.get()


def current_trace_id() -> str | None:
    """The id of the current trace, if there is one that is recorded."""
    trace = _CURRENT.get()
    return trace.trace_id if trace.recording else None


def stage_span(name: str) -> AbstractContextManager[None]:
    """A span of a stage of the request that this code serves."""
    return _CURRENT.get().stage(name)


@contextmanager
def serving(trace: RequestTrace) -> Iterator[RequestTrace]:
    """Make a trace the current one."""
    token = _CURRENT.set(trace)
    try:
        yield trace
    finally:
        _CURRENT.reset(token)
