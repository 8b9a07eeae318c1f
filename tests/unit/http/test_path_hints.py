"""Paths that aren't there: the answer says what to change in the client, in its API's shape."""

from __future__ import annotations

import pytest
from support.fake_engine import FakeEngine, proxy_before

from leyline_proxy.http.path_hints import hint, is_gemini

GEMINI = [
    "/v1beta/models/gemini-3-pro:generateContent",
    "/v1beta/models/gemini-3-pro:streamGenerateContent",
    "/v1/v1beta/models/gemini-3-pro:generateContent",
    "/v1/models/gemini-3-pro:countTokens",
    "/v1beta/models",
]


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/v1/chat/completions", "set its base URL without it (got /v1/v1)"),
        ("/v1/v1/v1/models", "set its base URL without it (got /v1/v1/v1)"),
        ("/chat/completions", "must end in /v1: the path is /v1/chat/completions"),
        ("/messages", "must end in /v1: the path is /v1/messages"),
        ("/api/chat", "Ollama's own API"),
        ("/v1/api/tags", "Ollama's own API"),
        ("/somewhere", "The API starts at /v1."),
        *((path, "Google's Gemini API") for path in GEMINI),
    ],
)
async def test_an_unknown_path_says_what_to_change(path: str, told: str) -> None:
    """The hint is in the answer, whichever part of the proxy refuses the path."""
    assert told in hint(path)
    async with proxy_before(FakeEngine()) as http:
        answer = await http.post(path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert told in error["message"]
    assert ("status" in error) is is_gemini(path)


@pytest.mark.parametrize("path", GEMINI)
async def test_gemini_clients_get_googles_shape(path: str) -> None:
    """Their SDKs read code, message and status."""
    async with proxy_before(FakeEngine()) as http:
        error = (await http.post(path, json={})).json()["error"]
    assert (error["code"], error["status"]) == (404, "NOT_FOUND")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/x", "/v1/chat/completions", "/v1beta"])
def test_other_paths_are_not_googles(path: str) -> None:
    """Paths of the APIs here keep their own shape of errors."""
    assert not is_gemini(path)
