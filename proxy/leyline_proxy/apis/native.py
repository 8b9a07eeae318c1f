"""Facts that the proxy reads from an upstream's answers in the client's own API. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Told:
    """Facts of one event of a stream."""

    usage: Mapping[str, Any] | None = None
    """Usage as a chat completion counts it; missing members keep their values."""
    bears_token: bool = False
    finishes: bool = False
    """True if the account is appended to this event; nothing changes it afterwards."""


NOTHING_TOLD = Told()


class NativeApi(Protocol):
    """An API that an upstream may speak itself."""

    @property
    def path(self) -> str:
        """Path of the API."""
        ...

    def passes(self, body: Mapping[str, Any]) -> bool:
        """Return True if a request can go to such an upstream unchanged."""
        ...

    def usage(self, answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the usage of a whole answer, as a chat completion counts it."""
        ...

    def told(self, data: bytes) -> Told:
        """Return the facts of an event's data."""
        ...
