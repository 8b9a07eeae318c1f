"""The tool by which a model gets evicted texts back; the proxy answers its calls itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import msgspec
import orjson

from ..model.asides import RECALL_TOOL
from .parse import ChatRequest
from .wire import replace_members, split_body

NotOffered = Literal["name_taken", "functions", "several_choices", "no_tools"]
"""The reason that a request's model isn't offered the tool."""

_ADDRESS = re.compile(r"sha256:([0-9a-f]{12,64})")
_DEFINITION = {
    "type": "function",
    "function": {
        "name": RECALL_TOOL,
        "description": (
            "Returns a text that was removed from this conversation to save space. A note such as "
            "[evicted: bash output, 2,314 tokens, sha256:…] stands in its place and has its "
            "address. Call this if you need the text again."
        ),
        "parameters": {
            "type": "object",
            "properties": {
                "address": {
                    "type": "string",
                    "description": "The address in the note: sha256: and the digits after it.",
                }
            },
            "required": ["address"],
        },
    },
}
_ENCODED = msgspec.json.encode(_DEFINITION)


def with_recall_tool(request: ChatRequest, *, tool: bool) -> ChatRequest:
    """Return a request that offers the tool if its tenant may recall and the request can carry it.

    The tool comes after the client's own, on every turn alike, so that prompts begin alike.

    Args:
        tool: False if the operator doesn't offer it.
    """
    if not tool or not recalls(request) or why_not_offered(request.body) is not None:
        return request
    own = request.body.get("tools") or []
    encoded = b"[%b]" % _ENCODED
    if own:
        raw = bytes(split_body(request.raw)["tools"]).rstrip()
        encoded = raw[:-1].rstrip() + b"," + _ENCODED + b"]"
    return replace(
        request,
        raw=replace_members(request.raw, {"tools": encoded}),
        body={**request.body, "tools": [*own, _DEFINITION]},
        offers_recall=True,
    )


def recalls(request: ChatRequest) -> bool:
    """Return True if texts may be put back into the request's conversation."""
    return request.tenant.recall and request.options.recall != "off"


def why_not_offered(body: Mapping[str, Any]) -> NotOffered | None:
    """Return the reason that a body can't carry the tool; None if it can."""
    if body.get("functions") or body.get("function_call") is not None:
        return "functions"
    if body.get("n") not in (None, 1):
        return "several_choices"
    if body.get("tool_choice") == "none":
        return "no_tools"
    named = [tool.get("function") for tool in body.get("tools") or () if isinstance(tool, dict)]
    if any(isinstance(each, Mapping) and each.get("name") == RECALL_TOOL for each in named):
        return "name_taken"
    return None


def address_in(arguments: str) -> str | None:
    """Return the address in a call's arguments, as written; None if they have none.

    Models quote the whole note, or leave out the JSON around the address.
    """
    found = _ADDRESS.search(arguments)
    return found[0] if found is not None else None


def fit_arguments(arguments: str) -> str:
    """Return a call's arguments as later prompts have them: those that name one address and nothing
    else as the model wrote them, others by the address that they have.

    Chat templates and engines refuse arguments that are no JSON object, on this turn and all later
    ones; a model that ran out of tokens leaves such.
    """
    try:
        read = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        read = None
    found = address_in(arguments)
    if isinstance(read, dict) and read == {"address": found}:
        return arguments
    return orjson.dumps({"address": found} if found is not None else {}).decode()
