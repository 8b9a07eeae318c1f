"""Members of a chat request that survive a router.

SGLang's router reads a request into types of its own and writes it again: ``custom_params``,
``cache_salt`` and every other member that it doesn't know is gone. OpenAI's ``metadata`` passes,
and a server that reads no metadata ignores it. So the proxy packs its members into one entry of
``metadata``, and the engine unpacks them in front of everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .capability import Capability
from .vocabulary import ACTION_VERSION, CARRIAGE_ACTION

UNPACKS = f"{CARRIAGE_ACTION}@{ACTION_VERSION}"
"""One of a capability's actions if the engine unpacks carried members."""

METADATA = "metadata"
CARRIED = "leyline_carried"
"""Name of the entry; its value is a JSON object, as text."""

CARRIABLE = frozenset({"custom_params", "cache_salt"})
"""Members that may be carried; others stay packed."""

_NAMED = b'"%b"' % CARRIED.encode()


def with_carriage(capability: Capability) -> Capability:
    """Return the capability of an engine that unpacks carried members."""
    if UNPACKS in capability.actions:
        return capability
    return msgspec.structs.replace(capability, actions=(*capability.actions, UNPACKS))


def packed(members: Mapping[str, msgspec.Raw], metadata: Mapping[str, Any]) -> bytes:
    """Return an encoded ``metadata`` that carries members, beside the client's own entries.

    Args:
        members: encoded, by name. They replace what the client sent under the entry's name.
    """
    return msgspec.json.encode({**metadata, CARRIED: msgspec.json.encode(members).decode()})


def unpacked(body: bytes) -> bytes:
    """Return a request with its carried members in their places.

    A body that carries nothing is returned unchanged, as is one that can't be read: the server
    itself refuses it.
    """
    if _NAMED not in body:
        return body
    try:
        request = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(request[METADATA], type=dict[str, Any])
        carried = msgspec.json.decode(metadata.pop(CARRIED), type=dict[str, msgspec.Raw])
    except (KeyError, TypeError, UnicodeDecodeError, msgspec.DecodeError):
        return body
    for name in CARRIABLE & carried.keys():
        request[name] = carried[name]
    if metadata:
        request[METADATA] = msgspec.Raw(msgspec.json.encode(metadata))
    else:
        del request[METADATA]
    return msgspec.json.encode(request)
