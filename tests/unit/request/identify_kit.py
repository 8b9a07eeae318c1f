"""Requests whose session is to be found."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from leyline_proxy.request.parse import ChatRequest, parse_chat
from leyline_proxy.settings import Settings
from leyline_proxy.tenants import Tenant, build_directory


def asked(
    messages: list[dict[str, Any]], headers: dict[str, str] | None = None, **members: Any
) -> ChatRequest:
    """A request."""
    raw = json.dumps({"model": "m", "messages": messages, **members}).encode()
    return parse_chat(raw, headers or {}, _tenant())


@cache
def _tenant() -> Tenant:
    return build_directory(Settings()).authenticate({})
