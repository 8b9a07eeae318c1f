"""Members that are carried through a router, and unpacked in front of the server."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from leyline_engine.contract import CARRIED, packed, unpacked
from leyline_engine.server.unpacking import Unpacking

TEXTS = st.dictionaries(st.text(max_size=5), st.text(max_size=9), max_size=4)
HINTS = b'{"kv_hints":{"message_id":"m-1"}}'
CHAT = "/v1/chat/completions"


def carrying(metadata: dict[str, str]) -> bytes:
    members = {"custom_params": msgspec.Raw(HINTS), "cache_salt": msgspec.Raw(b'"salt"')}
    body = {"model": "m", "metadata": msgspec.Raw(packed(members, metadata))}
    return msgspec.json.encode(body)


@given(TEXTS.filter(lambda metadata: CARRIED not in metadata))
def test_members_arrive_and_the_clients_metadata_stays(metadata: dict[str, str]) -> None:
    """Also after a router has read the request and written it again."""
    retyped = json.dumps(json.loads(carrying(metadata))).encode()
    request: dict[str, Any] = json.loads(unpacked(retyped))
    assert request.pop("custom_params") == json.loads(HINTS)
    assert request.pop("cache_salt") == "salt"
    assert request == {"model": "m"} | ({"metadata": metadata} if metadata else {})


@pytest.mark.parametrize(
    "metadata",
    [
        f'{{"{CARRIED}":7}}',
        f'{{"{CARRIED}":"no object"}}',
        f'["{CARRIED}"]',
        f'"{CARRIED}"',
    ],
)
def test_what_cannot_be_read_is_left_as_it_is(metadata: str) -> None:
    """The server judges the request; nothing fails in front of it."""
    body = f'{{"model":"m","metadata":{metadata}}}'.encode()
    assert unpacked(body) == body


def test_only_the_proxys_members_are_unpacked() -> None:
    """A carried member of another name doesn't replace one of the request's."""
    members = {"messages": msgspec.Raw(b"[]"), "model": msgspec.Raw(b'"other"')}
    body = msgspec.json.encode({"model": "m", "metadata": msgspec.Raw(packed(members, {}))})
    assert json.loads(unpacked(body)) == {"model": "m"}


async def test_a_server_reads_the_unpacked_request() -> None:
    """Body and length fit together; other paths get their bytes as they came."""

    async def echo(request: Request) -> JSONResponse:
        body = await request.body()
        length = int(request.headers["content-length"])
        return JSONResponse({"body": body.decode(), "fits": length == len(body)})

    app = Starlette(routes=[Route(path, echo, methods=["POST"]) for path in (CHAT, "/other")])
    app.add_middleware(Unpacking)
    transport = httpx.ASGITransport(app)
    raw = carrying({"mine": "1"})
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        chat = (await client.post(CHAT, content=raw)).json()
        other = (await client.post("/other", content=raw)).json()
    assert json.loads(chat["body"])["cache_salt"] == "salt"
    assert chat["fits"] and other["fits"]
    assert other["body"] == raw.decode()
