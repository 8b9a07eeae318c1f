"""Hints for paths that no API here has: the path that may be meant, and what the client's settings
should be instead. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rapidfuzz import process
from rapidfuzz.distance import Levenshtein

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
_BEFORE_MESSAGES = frozenset({"v1", "anthropic", "api"})
"""Parts that clients put in front of Anthropic's paths."""

_START = "The API starts at /v1."
_ROOT = "/v1"
_SHOWN = 200
"""Characters of a caller's path that are looked at, and shown."""
_NEAR = 0.75
"""Smallest similarity of a path that may be meant."""
_PLACEHOLDER = re.compile(r"\\\{\w+(:path)?\\\}")


class KnownPaths:
    """The paths of an application, with their methods.

    Args:
        routes: path and methods of each; a path may have placeholders, such as ``/x/{name}``.
    """

    def __init__(self, routes: Iterable[tuple[str, Iterable[str]]]) -> None:
        self._methods: dict[str, set[str]] = {}
        for path, methods in routes:
            self._methods.setdefault(path, set()).update(set(methods) - {"HEAD"})
        self._patterns = {path: re.compile(_pattern(path)) for path in self._methods}
        self._fixed = [path for path in self._methods if "{" not in path]

    def allowed(self, path: str) -> list[str]:
        """Return the methods of a path, sorted; none if it isn't there."""
        found = self._match(path)
        return sorted(self._methods[found]) if found is not None else []

    def nearest(self, method: str, path: str) -> str | None:
        """Return the path that may be meant, with its methods, or the method if it is one of them;
        None if no path is near.

        Slashes too many, other letters' case and what proxies put in front don't matter.
        """
        parts = [part for part in path[:_SHOWN].lower().split("/") if part]
        for tail in _tails(parts):
            if (found := self._match(tail)) is not None:
                return self._shown(method, found)
        written = "/" + "/".join(parts)
        near = process.extractOne(
            written, self._fixed, scorer=Levenshtein.normalized_similarity, score_cutoff=_NEAR
        )
        return self._shown(method, near[0]) if near is not None else None

    def _match(self, path: str) -> str | None:
        # A path without a placeholder is in front of one that it would match.
        if path in self._methods:
            return path
        return next((each for each, form in self._patterns.items() if form.fullmatch(path)), None)

    def _shown(self, method: str, path: str) -> str:
        methods = self._methods[path]
        shown = method if method in methods else " or ".join(sorted(methods))
        return f"{shown} {path.replace(':path}', '}')}"


def _pattern(path: str) -> str:
    return _PLACEHOLDER.sub(lambda found: ".+" if found[1] else "[^/]+", re.escape(path))


def _tails(parts: list[str]) -> Iterator[str]:
    """Yield paths that a path may stand for, the longest first."""
    if parts:
        yield "/" + "/".join(parts)
    for first in range(len(parts)):
        tail = parts[first:]
        while tail[:1] == ["v1"]:
            tail = tail[1:]
        if tail:
            yield f"{_ROOT}/{'/'.join(tail)}"


def is_gemini(path: str) -> bool:
    """Return True for a path of Google's Gemini API."""
    if _GEMINI_CALL.search(path) is not None:
        return True
    return "/v1beta" in path and _GEMINI.search(path) is not None


def is_anthropic(path: str) -> bool:
    """Return True for a path of Anthropic's API, even if its client has it slightly wrong."""
    for part in path[:_SHOWN].lower().split("/"):
        if part == "messages":
            return True
        if part and part not in _BEFORE_MESSAGES:
            return False
    return False


def is_mistaken(path: str) -> bool:
    """Return True if a client that asks for this path must be set up in another way."""
    return _setup(path) is not None


def shown_path(path: str) -> str:
    """Return a caller's path for a message: printable, and its beginning if it is long."""
    return ascii(path[:_SHOWN])[1:-1] + ("…" if len(path) > _SHOWN else "")


def hint(path: str, known: KnownPaths | None = None, method: str = "POST") -> str:
    """Return a sentence or two on how to reach the API from a path that isn't there."""
    setup = _setup(path)
    if is_gemini(path) or _OLLAMA.search(path) is not None or path in _WITHOUT_ROOT:
        return setup or _START
    near = known.nearest(method, path) if known is not None else None
    meant = f"Did you mean {near}?" if near is not None else None
    return " ".join(filter(None, (setup, meant))) or _START


def _setup(path: str) -> str | None:
    """Return what to change in a client's settings; None if that isn't known."""
    if (twice := _TWICE.match(path[:_SHOWN])) is not None:
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
    return None


def google_error(status: int, message: str) -> Mapping[str, Any]:
    """Return an error in the shape of Google's APIs."""
    names = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"}
    return {"error": {"code": status, "message": message, "status": names.get(status, "INTERNAL")}}
