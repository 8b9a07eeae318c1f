"""Answers that an upstream gives in the client's own API: what the proxy reads of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Told:
    """What one event of a stream says."""

    usage: Mapping[str, Any] | None = None
    """As a chat completion counts it; what isn't named stays as it was."""
    bears_token: bool = False
    finishes: bool = False
    """The account is appended to this event, behind which nothing changes it."""


NOTHING_TOLD = Told()


class NativeApi(Protocol):
    """One API that an upstream may speak itself."""

    @property
    def path(self) -> str:
        """Where it is spoken."""
        ...

    def passes(self, body: Mapping[str, Any]) -> bool:
        """Whether a request can go to such an upstream as it is."""
        ...

    def usage(self, answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The usage of a whole answer, as a chat completion counts it."""
        ...

    def told(self, data: bytes) -> Told:
        """What an event's data says."""
        ...
