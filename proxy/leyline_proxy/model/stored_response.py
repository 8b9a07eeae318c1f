"""A response kept for ``previous_response_id``, and its stored form."""

from __future__ import annotations

from typing import Any

import msgspec

UNKNOWN_TURN = 1 << 40
_VERSION = b"r1"


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response, and the new part of its request; ``previous`` has the conversation before."""

    id: str
    session: str
    """Id of the proxy's session."""
    previous: str | None = None
    input: list[dict[str, Any]] = []
    """The request's own items, as sent, each with an id."""
    response: dict[str, Any] = {}
    """The response as its client received it."""

    @property
    def output(self) -> list[dict[str, Any]]:
        """The response's items."""
        found: list[dict[str, Any]] = self.response.get("output") or []
        return found

    @property
    def turn(self) -> int:
        """Number of its turn in the session; a number that no turn has if it isn't known."""
        account = self.response.get("leyline")
        number = account.get("turn_index") if isinstance(account, dict) else None
        return number if isinstance(number, int) else UNKNOWN_TURN

    @property
    def items(self) -> dict[str, dict[str, Any]]:
        """All items that have an id, by it."""
        both = (*reversed(self.input), *reversed(self.output))  # of two, the first counts
        return {name: item for item in both if isinstance(name := item.get("id"), str)}


def encode(stored: StoredResponse) -> bytes:
    """Return ``stored`` as bytes, with their version."""
    # Not MessagePack: numbers in a client's JSON may be larger than it can hold.
    return _VERSION + msgspec.json.encode(stored)


def decode(raw: bytes) -> StoredResponse | None:
    """Return the response that :func:`encode` stored; None for damaged bytes or another version."""
    if not raw.startswith(_VERSION):
        return None
    try:
        return msgspec.json.decode(raw[len(_VERSION) :], type=StoredResponse)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
