"""Request bodies in a content encoding: read as if they weren't, bounded by what they become."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import re
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
import zstandard
from fastapi.routing import APIRoute
from starlette.requests import Request
from support.fake_engine import MODEL, FakeEngine, proxy_before

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.errors import BadRequestError
from leyline_proxy.http.app import create_app
from leyline_proxy.http.limits import read_body
from leyline_proxy.settings import Settings
from leyline_proxy.unpackers import UNPACKERS

MIB = 1024 * 1024
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TALK: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "Hällo."}],
}
Pack = Callable[[bytes], bytes]
PACKS: dict[str, Pack] = {
    "gzip": gzip.compress,
    "zstd": zstandard.compress,
    "deflate": zlib.compress,
}


def raw_deflate(data: bytes) -> bytes:
    """Deflate without zlib's header, as some clients send it."""
    return zlib.compress(data, wbits=-zlib.MAX_WBITS)


def windowed(data: bytes, log: int = 27) -> bytes:
    """A frame that demands memory of 2 ** ``log`` bytes."""
    parameters = zstandard.ZstdCompressionParameters(window_log=log)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return packer.compress(data) + packer.flush()


def with_dictionary(data: bytes) -> bytes:
    """A frame that only its sender's dictionary opens."""
    samples = [b"a sample of %d words, or %d" % (n, n * n) for n in range(2000)]
    shared = zstandard.train_dictionary(2048, samples)
    return zstandard.ZstdCompressor(dict_data=shared).compress(data)


def runs(blocks: int) -> bytes:
    """A frame of 128 KiB for every four bytes, which says nothing of its length."""
    frame = b"\x28\xb5\x2f\xfd" + bytes([0, 13 << 3])
    block = (1 << 1) | ((128 << 10) << 3)
    blank = struct.pack("<I", block)[:3] + b" "
    return frame + blank * (blocks - 1) + struct.pack("<I", block | 1)[:3] + b" "


def packing(library: Any, encoding: str) -> Any:
    """A client of httpx, or of what an SDK has in its place, that packs its bodies."""

    class Packed(library.HTTPTransport):  # type: ignore[misc]
        def handle_request(self, request: Any) -> Any:
            body = PACKS[encoding](request.read())
            headers = {**request.headers, "content-encoding": encoding}
            headers["content-length"] = str(len(body))
            return super().handle_request(
                library.Request(request.method, request.url, headers=headers, content=body)
            )

    return library.Client(transport=Packed())


@pytest.mark.parametrize("encoding", UNPACKERS)
def test_the_sdks_may_pack_their_requests(encoding: str) -> None:
    """The engine gets the bytes that it would have got, whole and streamed, in every API."""
    engine = FakeEngine()
    with (
        serving(create_app(Settings(log_level="error"), engine_app=engine)) as origin,
        packing(httpx, encoding) as http,
        packing(httpx2, encoding) as http2,
    ):
        o = openai.OpenAI(base_url=f"{origin}/v1", api_key="k", http_client=http, max_retries=0)
        a = anthropic.Anthropic(base_url=origin, api_key="k", http_client=http2, max_retries=0)
        asked: dict[str, Any] = {"model": MODEL, "messages": TALK["messages"]}
        assert o.chat.completions.create(**asked).choices[0].message.content == "Hello."
        assert len(list(o.chat.completions.create(**asked, stream=True))) > 1
        assert a.messages.create(**asked, max_tokens=9).stop_reason == "end_turn"
        with a.messages.stream(**asked, max_tokens=9) as events:
            assert events.get_final_text() == "Hello."
        assert o.responses.create(model=MODEL, input="Hällo.").output_text == "Hello."
        with o.responses.stream(model=MODEL, input="Hällo.") as given:
            assert given.get_final_response().output_text == "Hello."
    assert len(engine.bodies) == 6
    for body, headers in zip(engine.bodies, engine.headers, strict=True):
        assert json.loads(body)["messages"][-1]["content"] == "Hällo."
        assert "content-encoding" not in headers


def taking_bodies() -> Iterator[tuple[str, str]]:
    """Method and path of all routes that may take a body."""
    app = create_app(Settings(upstream="http://engine"))
    for route in (each for each in app.routes if isinstance(each, APIRoute)):
        for method in sorted(route.methods & {"POST", "PATCH"}):
            yield method, re.sub(r"\{\w+\}", "x", route.path.replace("{path:path}", "embeddings"))


@pytest.mark.parametrize(("method", "path"), [*taking_bodies()])
async def test_every_route_reads_packed_bodies(method: str, path: str) -> None:
    """The answer is that to the plain body; what can't be read is refused in the API's shape."""
    plain = b'{"nothing": 1}'
    codes = []
    async with proxy_before(FakeEngine(), recall="on") as client:
        await client.post(CHAT, json=TALK, headers={"x-leyline-session": "x"})

        async def sent(body: bytes, encoding: str | None) -> httpx.Response:
            headers = {"content-encoding": encoding} if encoding is not None else {}
            return await client.request(method, path, content=body, headers=headers)

        for body, encoding in (
            (plain, None),
            (gzip.compress(plain), "gzip"),
            (gzip.compress(plain), " identity, X-GZIP"),
            (zstandard.compress(plain), "zstd"),
            (raw_deflate(plain), "deflate"),
            (plain, "identity"),
        ):
            answer = await sent(body, encoding)
            codes.append((answer.status_code, answer.text.partition("request_id")[0]))
        torn = await sent(gzip.compress(plain)[:-1], "gzip")
        for encoding in ("br", "gzip, zstd", "gzip, gzip", "x" * 5000):
            refused = await sent(plain, encoding)
            assert refused.status_code == 415
            assert refused.headers["accept-encoding"] == "gzip, zstd, deflate"
            assert "unsupported_content_encoding" in refused.text
            assert "gzip, zstd, deflate" in refused.json()["error"]["message"]
            assert len(refused.content) < 1000
            assert (refused.json().get("type") == "error") is path.startswith(MESSAGES)
    assert len({*codes}) == 1, codes
    assert (torn.status_code, "invalid_content_encoding" in torn.text) == (400, True)


WRONG = {
    "bomb in gzip": (gzip.compress(b" " * 64 * MIB), "gzip", 413),
    "bomb in deflate": (raw_deflate(b" " * 64 * MIB), "deflate", 413),
    "bomb in zstd": (zstandard.compress(b" " * 64 * MIB), "zstd", 413),
    "bomb of runs": (runs(4000), "zstd", 413),
    "bomb in members": (gzip.compress(b" " * 65536) * 500, "gzip", 413),
    "bomb in frames": (zstandard.compress(b" " * 65536) * 500, "zstd", 413),
    "empty frames": (zstandard.compress(b"") * 20_000, "zstd", 400),
    "skipped frames": (struct.pack("<II", 0x184D2A50, 0) * 20_000, "zstd", 400),
    "empty members": (gzip.compress(b"") * 20_000, "gzip", 400),
    "window": (windowed(b"{}"), "zstd", 400),
    "dictionary": (with_dictionary(b"a sample of 7 words, or 49"), "zstd", 400),
    "torn zstd": (zstandard.compress(json.dumps(TALK).encode())[:-1], "zstd", 400),
    "torn deflate": (zlib.compress(json.dumps(TALK).encode())[:-1], "deflate", 400),
    "one byte": (b"\x78", "deflate", 400),
    "rest after zstd": (zstandard.compress(json.dumps(TALK).encode()) + b"{}", "zstd", 400),
    "rest after gzip": (gzip.compress(json.dumps(TALK).encode()) + b"\0", "gzip", 400),
    "rest after deflate": (zlib.compress(json.dumps(TALK).encode()) * 2, "deflate", 400),
    "damaged": (gzip.compress(json.dumps(TALK).encode())[:-8] + b"\1" * 8, "gzip", 400),
    "not packed": (json.dumps(TALK).encode(), "zstd", 400),
    "another": (gzip.compress(json.dumps(TALK).encode()), "zstd", 400),
}


@pytest.mark.parametrize(("body", "encoding", "status"), WRONG.values(), ids=WRONG)
async def test_a_packed_body_is_bounded_by_what_it_becomes(
    body: bytes, encoding: str, status: int
) -> None:
    """It is refused as it passes the limit, or is found to be wrong, and little of it was kept;
    nothing of it reaches the engine or the error."""
    engine = FakeEngine()
    async with proxy_before(engine, max_body_bytes=MIB) as client:
        tracemalloc.start()
        answer = await client.post(CHAT, content=body, headers={"content-encoding": encoding})
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (await client.post(CHAT, json=TALK)).status_code == 200
    assert answer.status_code == status, answer.text
    assert peak < 14 * MIB, peak
    error = answer.json()["error"]
    if status == 400:
        assert (error["param"], error["code"]) == ("content-encoding", "invalid_content_encoding")
        assert "llo" not in error["message"]
    assert len(engine.bodies) == 1


def request_of(parts: list[bytes], encoding: str) -> Request:
    """A request whose body comes in parts."""
    left = iter(parts)

    async def receive() -> dict[str, Any]:
        part = next(left, None)
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}

    headers = [(b"content-encoding", encoding.encode())]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


@pytest.mark.parametrize("cut", [1, 7, 100_000])
@pytest.mark.parametrize("encoding", [*UNPACKERS, "raw"])
async def test_a_body_may_come_in_any_parts(encoding: str, cut: int) -> None:
    """Members and their ends may lie anywhere in the parts, and pieces end anywhere in members."""
    texts = [b"", b"{", b" " * 262_144, b" " * 262_143, bytes(range(256)) * 5, b"}"]
    if encoding in ("deflate", "raw"):
        texts = [b"".join(texts)]
    pack = {**PACKS, "raw": raw_deflate}[encoding]
    packed = b"".join(map(pack, texts))
    torn, parts = (
        [each[at : at + cut] for at in range(0, len(each), cut)] for each in (packed[:-1], packed)
    )
    name = "deflate" if encoding == "raw" else encoding
    read = await read_body(request_of(parts, name), MIB, timeout_s=60, values=None)
    assert read == b"".join(texts)
    with pytest.raises(BadRequestError):
        await read_body(request_of(torn, name), MIB, timeout_s=60, values=None)


@pytest.mark.parametrize("encoding", UNPACKERS)
async def test_other_work_runs_while_a_body_is_unpacked(encoding: str) -> None:
    """The loop is free again after each few MiB, whatever few bytes they come from."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        for _ in itertools.count():
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.create_task(others())
    packed = runs(256) if encoding == "zstd" else PACKS[encoding](b" " * 32 * MIB)
    read = await read_body(request_of([packed], encoding), 32 * MIB, timeout_s=600, values=None)
    beside.cancel()
    assert len(read) == 32 * MIB
    assert turns >= 32 // 4


async def test_a_piece_may_end_where_the_packed_bytes_do() -> None:
    """The last packed byte may become more than fits into its piece."""
    for size in range(262_144, 262_144 + 520, 13):
        packed = raw_deflate(b" " * size)
        read = await read_body(request_of([packed], "deflate"), MIB, timeout_s=60, values=None)
        assert len(read) == size
