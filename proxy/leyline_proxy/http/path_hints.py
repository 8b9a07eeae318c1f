"""Hints for paths that no API here has: what the client's settings should be instead. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TWICE = re.compile(r"/v1(/v1)+(?=/|$)")
_GEMINI = re.compile(
    r"/(?:v1/)?v1(?:alpha|beta\d*)?/(?:models|tunedModels|cachedContents)(?:/[^/]*:\w+)?$"
)
_GEMINI_CALL = re.compile(r":(?:stream)?[Gg]enerateContent$|:countTokens$|:embedContent$")
_OLLAMA = re.compile(r"/(?:v1/)?api/(?:chat|generate|tags|show|embed|embeddings|version|ps)$")
_WITHOUT_ROOT = frozenset(
    {
        "/chat/completions",
        "/completions",
        "/messages",
        "/messages/count_tokens",
        "/models",
        "/responses",
        "/embeddings",
    }
)

_START = "The API starts at /v1."


def is_gemini(path: str) -> bool:
    """Return True for a path of Google's Gemini API."""
    if _GEMINI_CALL.search(path) is not None:
        return True
    return "/v1beta" in path and _GEMINI.search(path) is not None


def is_mistaken(path: str) -> bool:
    """Return True if a client that asks for this path must be set up in another way."""
    return hint(path) != _START


def hint(path: str) -> str:
    """Return a sentence or two on how to reach the API from a path that isn't there."""
    if (twice := _TWICE.match(path)) is not None:
        return f"The client adds /v1 itself: set its base URL without it (got {twice[0]})."
    if is_gemini(path):
        return (
            "This is Google's Gemini API, which isn't served here. Choose the client's OpenAI or "
            "Anthropic provider, with a base URL that ends in /v1."
        )
    if _OLLAMA.search(path) is not None:
        return (
            "This is Ollama's own API, which isn't served here. Choose the client's OpenAI "
            "provider, with a base URL that ends in /v1."
        )
    if path in _WITHOUT_ROOT:
        return f"The client's base URL must end in /v1: the path is /v1{path}."
    return _START


def google_error(status: int, message: str) -> Mapping[str, Any]:
    """Return an error in the shape of Google's APIs."""
    names = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"}
    return {"error": {"code": status, "message": message, "status": names.get(status, "INTERNAL")}}
