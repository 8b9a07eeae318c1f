"""Events of a streamed answer, in an API other than chat completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import msgspec

Event = dict[str, Any]
"""One event; ``type`` is its name."""


class Events(Protocol):
    """Events of one answer, made from the chunks of a chat completion."""

    @property
    def ended(self) -> bool:
        """True once nothing may follow."""

    def feed(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events that a chunk adds.

        Raises:
            AnswerError: the chunk can't be expressed in this API.
        """

    def close(self) -> Iterator[Event]:
        """Yield the events that end the answer, once.

        Raises:
            AnswerError: the engine never reported a finish reason.
        """

    def keep_alive(self, comment: bytes) -> bytes:
        """Return the bytes that keep the connection alive, in place of the engine's comment."""


def encoded(events: Iterable[Event]) -> bytes:
    """Return events as the bytes of a stream, named by their type."""
    # Not orjson: numbers in a client's JSON may have any size.
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))
        for event in events
    )
