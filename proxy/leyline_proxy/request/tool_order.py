"""The order of a request's tools: as the client sent them, or as its session had them first.

Clients that connect to tool servers send equal tools in another order after a reconnect, and all KV
behind the tools is then of no use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import xxhash

from .parse import ChatRequest
from .wire import replace_members, split_body

MAX_TOOLS = 4096
"""Largest number of a session's tools whose order is kept; later ones come as they were sent."""

_LISTS = ("tools", "functions")


def keeps_order(request: ChatRequest) -> bool:
    """Return True if the tools go out in the session's first order: as the request says, or else
    its tenant."""
    return (request.options.tool_order or request.tenant.tool_order) == "first"


def in_first_order(request: ChatRequest, known: Sequence[int]) -> ChatRequest:
    """Return a request with its tools in the session's first order, and new ones after them, in the
    client's; the same request if nothing moves.

    Args:
        known: :attr:`~leyline_proxy.model.session.Session.tools`.
    """
    if not known or not keeps_order(request):
        return request
    places = _places(request.body, known)
    if not places:
        return request
    moved = sum(at != place for each in places.values() for at, place in enumerate(each))
    body = {name: [request.body[name][at] for at in each] for name, each in places.items()}
    raw = _with_places(request.raw, places)
    return replace(request, raw=raw, body={**request.body, **body}, moved_tools=moved)


def native_in_first_order(raw: bytes, body: Mapping[str, Any], known: Sequence[int]) -> bytes:
    """Return a request of another API with its tools in the session's first order.

    Args:
        body: ``raw``, decoded.
    """
    return _with_places(raw, _places(body, known))


def tools_after(known: Sequence[int], request: ChatRequest) -> tuple[int, ...]:
    """Return the order of a session's tools after a request, if that is kept."""
    if not keeps_order(request):
        return (*known,)
    own = (name for member in _LISTS for name in _names(request.body, member))
    return tuple(dict.fromkeys([*known, *own]))[:MAX_TOOLS]


def _with_places(raw: bytes, places: Mapping[str, Sequence[int]]) -> bytes:
    """Return a body whose lists have their items, byte for byte, in another order.

    Args:
        places: old places of the items in their new order, by the list's name.
    """
    if not places:
        return raw
    members = split_body(raw)
    lists = {name: msgspec.json.decode(members[name], type=list[msgspec.Raw]) for name in places}
    encoded = {
        name: b"[%b]" % b",".join(bytes(lists[name][at]) for at in each)
        for name, each in places.items()
    }
    return replace_members(raw, encoded)


def _places(body: Mapping[str, Any], known: Sequence[int]) -> dict[str, list[int]]:
    """Return the lists that change, as :func:`_with_places` takes them."""
    ranks = {name: rank for rank, name in enumerate(known)}
    found = {}
    for member in _LISTS:
        order = [ranks.get(name, len(ranks)) for name in _names(body, member)]
        places = sorted(range(len(order)), key=order.__getitem__)
        if places != [*range(len(order))]:
            found[member] = places
    return found


def _names(body: Mapping[str, Any], member: str) -> Iterator[int]:
    """Yield a digest of each tool's name; of its type, if it has no name."""
    tools = body.get(member)
    for tool in tools if isinstance(tools, list) else ():
        holder = tool if isinstance(tool, Mapping) else {}
        own = holder.get("function") or holder.get("custom")
        named = own if isinstance(own, Mapping) else holder
        name = named.get("name") or holder.get("type")
        yield xxhash.xxh3_64_intdigest(str(name).encode("utf-8", "surrogatepass"))
