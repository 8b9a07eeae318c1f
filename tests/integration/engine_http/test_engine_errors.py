"""The replay engine over HTTP: bad input, named and in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.applications import Starlette
from support.engine_http import (
    POOL,
    chat,
    client_of,
    record_of,
)

from leyline_replay.factory import serve_model
from leyline_replay.http.app import ServingOptions
from leyline_replay.models.loader import LoadedModel


@pytest.mark.parametrize(
    ("kv_hints", "reason"),
    [
        ({"message_id": "bad"}, "invalid_edit"),
        (
            {
                "protocol_version": "0.1",
                "message_id": "bad",
                "actions": [
                    {
                        "action_id": "a",
                        "action_type": "leyline.edit",
                        "action_version": "1.0",
                        "payload": {
                            "session": "s",
                            "scope": "t",
                            "turn": "u",
                            "directives": [{"start": "x", "end": 1}],
                        },
                    }
                ],
            },
            "invalid_directive",
        ),
    ],
)
async def test_malformed_hints_never_fail_a_request(
    app: Starlette, kv_hints: Any, reason: str
) -> None:
    """The request runs as an ordinary prefill and its receipt says what was wrong."""
    response = await chat(app, max_tokens=1, custom_params={"kv_hints": kv_hints})
    assert response.status_code == 200
    receipt = (await record_of(app, "bad"))["receipt"]
    assert (receipt["outcome"], receipt["reason"]) == ("reprefilled", reason)
    assert receipt["detail"]
    for nonsense in (5, "x", [], {"kv_hints": None}):
        assert (await chat(app, max_tokens=1, custom_params=nonsense)).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"model": "gpt-x"}, 404, "model", "model_not_found"),
        ({"n": 2}, 400, "n", "unsupported_parameter"),
        ({"messages": []}, 400, "messages", None),
        ({"messages": "hi"}, 400, "messages", "invalid_type"),
        ({"messages": [{"role": "wizard", "content": ""}]}, 400, "messages[0].role", None),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages[0].content[0].type",
            "unsupported_content",
        ),
        ({"max_tokens": 0}, 400, "max_tokens", "invalid_type"),
        ({"max_tokens": POOL}, 400, "messages", "context_length_exceeded"),
        ({"temperature": 3}, 400, "temperature", "invalid_type"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias", None),
        ({"top_logprobs": 2}, 400, "top_logprobs", None),
        ({"response_format": {"type": "json_object"}}, 400, "response_format", None),
        ({"tool_choice": "required"}, 400, "tool_choice", "unsupported_parameter"),
        ({"stop": ["x"] * 17}, 400, "stop", None),
        ({"top_k": -5}, 400, "top_k", None),
    ],
)
async def test_bad_chat_requests(
    app: Starlette, body: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    """Each bad field gives an OpenAI-shaped error that names it, before any stream begins."""
    for stream in (False, True):
        response = await chat(app, **body, stream=stream)
        assert response.status_code == status
        error = response.json()["error"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        if code is not None:
            assert error["code"] == code


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 99999]}, "prompt"),
        ({}, "prompt"),
    ],
)
async def test_bad_completion_requests(app: Starlette, body: dict[str, Any], param: str) -> None:
    """An unsupported request is refused by name."""
    async with client_of(app) as client:
        response = await client.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_malformed_bodies(app: Starlette) -> None:
    """Broken JSON and broken UTF-8 are the caller's fault, and say so."""
    async with client_of(app) as client:
        for content in (b"", b"{", b'{"messages": "\xff"}', b"[1]", b"[" * 100_000):
            response = await client.post("/v1/chat/completions", content=content)
            assert response.status_code == 400
            assert response.json()["error"]["type"] == "invalid_request_error"


async def test_secret_is_asked_for(loaded: LoadedModel) -> None:
    """With a secret set, only health answers without it."""
    app = serve_model(loaded, pool_tokens=1024, options=ServingOptions(api_secret="k"))
    async with client_of(app) as client:
        refused = await client.get("/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        allowed = await client.get("/v1/models", headers={"authorization": "Bearer k"})
        assert allowed.status_code == 200
        assert (await client.get("/health")).status_code == 200
    app.state.shutdown()
