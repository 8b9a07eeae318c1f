"""A response that is kept for ``previous_response_id``, and its form at rest."""

from __future__ import annotations

from typing import Any

import msgspec

_VERSION = b"r1"


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response, and what was new in its request. The conversation before is the one that led to
    ``previous``."""

    id: str
    session: str
    """Of the proxy's sessions."""
    previous: str | None = None
    input: list[dict[str, Any]] = []
    """The request's own items, as sent, each with an id."""
    response: dict[str, Any] = {}
    """As its client got it."""

    @property
    def output(self) -> list[dict[str, Any]]:
        """The items that it gave."""
        found: list[dict[str, Any]] = self.response.get("output") or []
        return found

    def item(self, identifier: str) -> dict[str, Any] | None:
        """An item by its id."""
        both = (*self.output, *self.input)
        return next((item for item in both if item.get("id") == identifier), None)


def encode(stored: StoredResponse) -> bytes:
    """``stored`` as bytes, with their version."""
    # Not MessagePack: numbers in a client's JSON may be larger than it can hold.
    return _VERSION + msgspec.json.encode(stored)


def decode(raw: bytes) -> StoredResponse | None:
    """What :func:`encode` made; None for bytes of another version, or damaged ones."""
    if not raw.startswith(_VERSION):
        return None
    try:
        return msgspec.json.decode(raw[len(_VERSION) :], type=StoredResponse)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
