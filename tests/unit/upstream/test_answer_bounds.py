"""An engine whose answer has no end: little of it is kept, and the client gets an error."""

from __future__ import annotations

import gzip
import itertools
import json
import tracemalloc
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import pytest
import zstandard
from support.fake_engine import DONE, MODEL, Answer, FakeEngine, chat_json, chunk, proxy_before

from leyline_lab.stand_ins.serving import serving
from leyline_proxy.http.app import create_app
from leyline_proxy.settings import Settings

MIB = 1024 * 1024
SMALL = {"max_answer_bytes": MIB, "max_event_bytes": 64 * 1024, "log_level": "error"}
SSE = "text/event-stream"
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi."}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 50},
    "/v1/responses": {"input": "Hi.", "store": False},
    "/v1/completions": {"prompt": "Hi."},
}
CHAT = "/v1/chat/completions"
FIRST = chunk({"role": "assistant", "content": "a" * 16_000})


class Endless(FakeEngine):
    """Sends the last of its parts for ever; counts what it sent."""

    def __init__(self, *parts: bytes, kind: str = "application/json", **headers: str) -> None:
        super().__init__()
        self.sent_bytes = 0
        self.answers = [Answer(self._parts(parts), content_type=kind, headers=headers)]  # type: ignore[arg-type]

    def _parts(self, parts: tuple[bytes, ...]) -> Iterable[bytes]:
        for part in itertools.chain(parts, itertools.repeat(parts[-1])):
            self.sent_bytes += len(part)
            yield part


async def asked(engine: FakeEngine, route: str, stream: bool = False) -> httpx.Response:
    """Return a client's answer. The engine counts as up all the same."""
    async with proxy_before(engine, **SMALL) as client:
        answer = await client.post(route, json={"model": MODEL, "stream": stream, **ROUTES[route]})
        assert (await client.get("/readyz")).json()["upstreams"][0]["up"]
    return answer


def raw_deflate(data: bytes) -> bytes:
    """Deflate without zlib's header."""
    return zlib.compress(data, wbits=-zlib.MAX_WBITS)


def told(error: Any) -> bool:
    """Return True if an error, in whatever API's shape, says what was wrong."""
    return "longer than" in json.dumps(error)


@pytest.mark.parametrize("route", ROUTES)
async def test_a_whole_answer_without_end_is_given_up(route: str) -> None:
    """It's a 502 in the route's shape, before much more than the limit was read."""
    engine = Endless(b'{"choices": [', b" " * 65536)
    answer = await asked(engine, route)
    assert answer.status_code == 502
    assert told(answer.json()["error"])
    assert engine.sent_bytes < 4 * MIB


def zipped(size: int) -> bytes:
    """Spaces, packed."""
    return gzip.compress(b" " * size)


@pytest.mark.parametrize(
    ("packed", "encoding", "code"),
    [
        (zipped(64 * MIB), "gzip", "upstream_answer_too_large"),
        (gzip.compress(zipped(256 * MIB)), "gzip, gzip", "upstream_unreachable"),
        (zstandard.compress(b" " * (64 * MIB)), "zstd", "upstream_unreachable"),
        (zipped(4096)[:-9], "gzip", "upstream_unreachable"),
    ],
    ids=["gzip", "twice", "zstd", "torn"],
)
async def test_a_packed_answer_is_measured_by_what_it_becomes(
    packed: bytes, encoding: str, code: str
) -> None:
    """It is unpacked in pieces, as far as the limit. Layers, and what nobody asked for, aren't."""
    engine = FakeEngine()
    async with proxy_before(engine, **SMALL) as client:
        engine.answers = [Answer([packed], headers={"content-encoding": encoding})]
        tracemalloc.start()
        answer = await client.post(CHAT, json={"model": MODEL, **ROUTES[CHAT]})
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, code)
    assert peak < 8 * MIB, peak


@pytest.mark.parametrize(
    "pack", [gzip.compress, zlib.compress, raw_deflate], ids=lambda f: f.__name__
)
async def test_a_packed_answer_within_the_limit_is_read(pack: Callable[[bytes], bytes]) -> None:
    """Some gateways pack answers though the proxy asks them not to."""
    engine, whole = FakeEngine(), chat_json("Hello.")
    encoding = "gzip" if pack is gzip.compress else "deflate"
    engine.answers = [
        Answer([pack(b"".join(whole.chunks))], headers={"content-encoding": encoding})
    ]
    answer = await asked(engine, CHAT)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello."


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "parts",
    [(b"data: ", b"x" * 16_384), (b": " + b"x" * 16_384 + b"\n\n",)],
    ids=["event", "comments"],
)
async def test_a_stream_that_says_nothing_without_end_is_a_502(
    route: str, parts: tuple[bytes, ...]
) -> None:
    """Neither an event that never ends nor comments before the first are kept for ever."""
    engine = Endless(*parts, kind=SSE)
    answer = await asked(engine, route, stream=True)
    assert answer.status_code == 502
    assert told(answer.json()["error"])
    assert engine.sent_bytes < 4 * MIB


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/responses"])
async def test_a_stream_that_is_kept_has_an_end(route: str) -> None:
    """If an answer is put together from its stream, the whole stream is bounded."""
    engine = Endless(FIRST, kind=SSE)
    answer = await asked(engine, route, stream=True)
    *_, last = [event for event in answer.text.split("\n\n") if event]
    assert told(last)
    assert engine.sent_bytes < 4 * MIB


async def test_a_stream_that_is_passed_on_may_be_long() -> None:
    """Bytes passed on as they come are not kept, but for an event without end."""
    engine = FakeEngine()
    long = [FIRST] * (3 * MIB // len(FIRST))
    engine.answers = [
        Answer([*long, chunk({}, "stop"), DONE], content_type=SSE),
        Answer([FIRST, b"data: " + b"x" * MIB], content_type=SSE),
    ]
    whole = await asked(engine, CHAT, stream=True)
    assert whole.content.endswith(DONE)
    torn = await asked(engine, CHAT, stream=True)
    assert torn.content.startswith(FIRST)
    assert b"upstream_answer_too_large" in torn.content


def test_the_connection_to_the_engine_is_closed() -> None:
    """Over a real one, the engine learns at once that its answer has no reader any more."""
    engine = Endless(b" " * 65536)
    with (
        serving(engine) as upstream,
        serving(create_app(Settings(upstream=upstream, **SMALL))) as origin,  # type: ignore[arg-type]
    ):
        answer = httpx.post(f"{origin}{CHAT}", json={"model": MODEL, **ROUTES[CHAT]})
        assert answer.status_code == 502
    assert engine.disconnects == 1
    assert engine.sent_bytes < 16 * MIB
