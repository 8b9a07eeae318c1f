"""A router whose choices a test makes: over HTTP, it retypes bodies as SGLang's router does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

KEPT = frozenset(
    {"model", "messages", "max_tokens", "temperature", "ignore_eos", "stream", "stream_options"}
    | {"metadata", "tools"}
)
"""Members that its type of a request has."""

ANSWERED = frozenset({"id", "object", "created", "model", "choices", "usage"})
"""Members that its type of an answer has."""

Target = Callable[[httpx.Headers], str]


class SwitchingRouter:
    """Sends each request where ``target`` says.

    Attributes:
        target: the origin for a request's headers.
        kept: members of bodies that survive.
        token: value of ``x-session-token`` in answers, by origin.
        retypes: True to also drop the members of whole answers that OpenAI's API doesn't have.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.kept = KEPT
        self.token: dict[str, str] = {}
        self.retypes = False
        self.headers: list[httpx.Headers] = []
        self.bodies: list[dict[str, Any]] = []
        self.app = Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])

    async def _chat(self, request: Request) -> Response:
        headers = httpx.Headers(request.headers.raw)
        body = json.loads(await request.body())
        self.headers.append(headers)
        self.bodies.append(body)
        typed = {name: value for name, value in body.items() if name in self.kept}
        origin = self.target(headers)
        async with httpx.AsyncClient(timeout=60) as client:
            try:
                answer = await client.post(f"{origin}/v1/chat/completions", json=typed)
            except httpx.TransportError:
                return JSONResponse({"error": {"message": "no worker"}}, 503)
        shown = {"content-type": answer.headers["content-type"]}
        if origin in self.token:
            shown["x-session-token"] = self.token[origin]
        content = answer.content
        if self.retypes:
            content = json.dumps({k: v for k, v in answer.json().items() if k in ANSWERED}).encode()
        return Response(content, answer.status_code, headers=shown)
