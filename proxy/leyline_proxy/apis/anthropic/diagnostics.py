"""Prompt-cache diagnostics of the Messages API: which part of a request differs from the last one.

A client sends ``diagnostics.previous_message_id`` with the id of its last answer. What that request
was is kept as hashes, in this process only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from secrets import token_bytes
from typing import Any

import msgspec
import xxhash

from ...model.history import history_chain
from ..fields import FieldError
from .request import ChatMapping

MAX_PRINTS = 4096
"""Requests that are remembered, of all tenants."""

_LONGEST_ID = 128
_OPTIONS = ("chat_template_kwargs", "reasoning_effort", "tool_choice", "parallel_tool_calls")
"""Further members of the chat request that may change its prompt."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The request's member ``diagnostics``."""

    previous: str | None
    """Id of the answer to compare with; None on the first turn."""


@dataclass(frozen=True, slots=True)
class RequestPrint:
    """A request as hashes."""

    model: str
    system: int
    tools: int
    options: int
    messages: int
    """Number of chat messages, system included."""
    chain: int
    """Hash of all of them, in order."""


class RequestPrints:
    """The latest requests that asked for diagnostics, by tenant and by id of the answer."""

    def __init__(self, most: int = MAX_PRINTS) -> None:
        self._most = most
        self._key = token_bytes(32)
        self._prints: OrderedDict[tuple[str, str], RequestPrint] = OrderedDict()

    def chain(self, fingerprints: Sequence[int]) -> list[int]:
        """Return hashes of a list's beginnings."""
        return history_chain(fingerprints, self._key)

    def put(self, tenant: str, message_id: str, made: RequestPrint) -> None:
        """Remember a request; the oldest is forgotten if there are too many."""
        self._prints[tenant, message_id] = made
        if len(self._prints) > self._most:
            self._prints.popitem(last=False)

    def get(self, tenant: str, message_id: str) -> RequestPrint | None:
        """Return a tenant's request by the id of its answer; None if it isn't remembered."""
        return self._prints.get((tenant, message_id))


def asked_diagnostics(body: Mapping[str, Any]) -> Asked | None:
    """Return the request's member; None if it asks for no diagnostics.

    Raises:
        FieldError: the member is wrong.
    """
    given = body.get("diagnostics")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise FieldError("diagnostics", "diagnostics must be an object.")
    previous = given.get("previous_message_id")
    if previous is not None and not (isinstance(previous, str) and len(previous) <= _LONGEST_ID):
        field = "diagnostics.previous_message_id"
        raise FieldError(field, f"{field} must be the id of a message, or null.")
    return Asked(previous)


def print_of(
    mapping: ChatMapping, model: str, fingerprints: Sequence[int], end: int, tools: object
) -> RequestPrint:
    """Return a request as hashes.

    Args:
        fingerprints: of its chat messages.
        end: hash of all of them.
        tools: as they are sent.
    """
    first = next(
        (at for at, origin in enumerate(mapping.origins) if origin.startswith("messages")),
        len(mapping.origins),
    )
    chat = mapping.body
    return RequestPrint(
        model=model,
        system=_digest(fingerprints[:first]),
        tools=_digest(tools),
        options=_digest([chat.get(name) for name in _OPTIONS]),
        messages=len(fingerprints),
        chain=end,
    )


def diagnosis(
    before: RequestPrint | None, now: RequestPrint, chain: Sequence[int], missed: int
) -> dict[str, Any] | None:
    """Return the answer's member ``diagnostics``; None if the prompt only grew.

    Args:
        before: the earlier request; None if it isn't remembered.
        chain: hashes of the beginnings of this request's messages.
        missed: prompt tokens that the session has had, and that aren't in the cache.
    """
    if before is None:
        return _reason("previous_message_not_found")
    grown = before.messages <= now.messages and (
        not before.messages or chain[before.messages - 1] == before.chain
    )
    differences = (
        ("model_changed", before.model != now.model),
        ("system_changed", before.system != now.system),
        ("tools_changed", before.tools != now.tools),
        ("messages_changed", not grown),
    )
    for kind, differs in differences:
        if differs:
            return _reason(kind, cache_missed_input_tokens=missed)
    # A policy, a template or the engine is the reason, for which this API has no word.
    return _reason("unavailable") if missed or before.options != now.options else None


def _reason(kind: str, **members: int) -> dict[str, Any]:
    return {"cache_miss_reason": {"type": kind, **members}}


def _digest(value: object) -> int:
    return xxhash.xxh3_64_intdigest(msgspec.json.encode(value))
