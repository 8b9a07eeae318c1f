"""The load: agents that continue their sessions, turn after turn, on connections of their own."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from leyline_proxy.render import ChatRenderer
from proxy_turn import FRESH_CHARS, SYSTEM, TOOLS, rounds, text_of_size

from .upstream import MODEL

Message = dict[str, Any]
ANSWERS = 32

_CHARS_PER_TOKEN = 3.0
"""A first guess at the characters per token of a session."""
_CHUNK_EDGE = re.compile(rb"\r\n[0-9a-f]+\r\n")
_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)


def canned_answers(renderer: ChatRenderer) -> list[dict[str, Any]]:
    """Return the assistant's messages with which the upstream answers, and their tokens."""
    before = [{"role": "user", "content": "Go on."}]
    start = len(renderer.render(before, TOOLS).tokens)
    found = []
    for number, (said, _) in zip(range(ANSWERS), rounds(random.Random(3), 100), strict=False):
        said["tool_calls"][0]["id"] = f"call_a{number}"
        whole = renderer.encode(renderer.text([*before, said], TOOLS, add_generation_prompt=False))
        found.append({"message": said, "tokens": whole[start:-1].tolist()})
    return found


class Session:
    """One agent's session, whose requests continue one another.

    Args:
        seed: seed of its texts, which no other session has.
        opening: the messages with which it begins.
    """

    def __init__(self, seed: str, opening: Sequence[Message], answers: Sequence[Message]) -> None:
        self._rng = random.Random(seed)
        self._messages = bytearray(b",".join(map(_encoded, opening)))
        self._answers = answers
        self._turn = 0

    def next_request(self, *, stream: bool, chunks: int) -> bytes:
        """Return the next turn's body: an answer and a tool result more than the last."""
        if self._turn:
            said = self._answers[(self._turn - 1) % len(self._answers)]
            result = {
                "role": "tool",
                "tool_call_id": said["tool_calls"][0]["id"],
                "content": text_of_size(self._rng, FRESH_CHARS),
            }
            self._messages += b"," + _encoded(said) + b"," + _encoded(result)
        members = {"seed": self._turn, "max_tokens": chunks, "stream": stream}
        self._turn += 1
        return b"".join(
            (
                b'{"model":"%b","messages":[' % MODEL.encode(),
                self._messages,
                b'],"tools":',
                _encoded(TOOLS),
                b"," + _encoded(members)[1:],
            )
        )


class Sessions:
    """Makes sessions of a size; no two have a long text in common.

    Args:
        tokens: tokens of a session's first prompt.
    """

    def __init__(self, renderer: ChatRenderer, tokens: int, answers: Sequence[Message]) -> None:
        self._answers = answers
        self._base = _opening(renderer, tokens)
        self._made = 0

    @property
    def messages(self) -> int:
        """Number of messages with which a session begins."""
        return len(self._base)

    def make(self) -> Session:
        """Return a new session."""
        self._made += 1
        mark = f"[{self._made:04d}] "
        opening = [{**each, "content": mark + each["content"]} for each in self._base]
        return Session(mark, opening, self._answers)


def _opening(renderer: ChatRenderer, tokens: int) -> list[Message]:
    rng = random.Random(7)
    task = {"role": "user", "content": "Find out why the cache loses tokens, and mend it."}
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, task]
    length = len(renderer.render(messages, TOOLS).tokens)
    for said, result in rounds(rng, tokens // 5):
        length += len(renderer.encode(renderer.text([said, result], None)))
        if length > tokens and len(messages) > 4:
            return messages
        messages += [said, result]
    return messages


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class Client:
    """One keep-alive connection."""

    def __init__(self, origin: str) -> None:
        url = urlsplit(origin)
        self.first_s = 0.0
        """Seconds to the last answer's first byte, a new connection included."""
        self._host, self._port = url.hostname or "127.0.0.1", url.port or 80
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(self, body: bytes) -> float:
        """Post a body; returns the seconds to the answer's last byte.

        Raises:
            RuntimeError: the answer isn't whole, or not that of the upstream.
        """
        asked = perf_counter()
        if self._reader is not None and self._reader.at_eof():
            await self.aclose()  # the server closes idle connections
        if self._reader is None or self._writer is None:
            opened = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
            self._reader, self._writer = opened
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
            "authorization: Bearer none\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        started = perf_counter()
        self._writer.write(head.encode() + body)
        received = await self._reader.readuntil(b"\r\n\r\n")
        self.first_s = perf_counter() - asked
        length = _LENGTH.search(received)
        if length is not None:
            answer = await self._reader.readexactly(int(length[1]))
        else:
            answer = await self._reader.readuntil(b"\r\n0\r\n\r\n")
        took = perf_counter() - started
        if length is None:
            answer = _CHUNK_EDGE.sub(b"", answer)  # a proxy may cut the text anywhere
        whole = b"tool_calls" in answer and (length is not None or b"[DONE]" in answer)
        if b" 200 " not in received[:16] or not whole:
            raise RuntimeError(f"the answer is no completion: {received[:40]!r} {answer[-200:]!r}")
        return took

    async def aclose(self) -> None:
        """Close the connection."""
        if self._writer is not None:
            self._writer.close()
            with suppress(ConnectionError):
                await self._writer.wait_closed()
        self._reader = self._writer = None


@dataclass
class Sample:
    """Measurements of one run of a load."""

    seconds: list[float] = field(default_factory=list)
    """Seconds of each request, to the last byte."""
    cpu_s: float = 0.0
    """CPU seconds of the system's processes."""
    opening_cpu_s: float = 0.0
    """CPU seconds for the sessions' first requests."""
    wall_s: float = 0.0
    sessions: int = 0
    upstream_requests: int = 0
    """Number of requests to the upstream, handshakes included."""

    def add(self, other: Sample) -> None:
        """Add another run of the same load."""
        self.seconds += other.seconds
        self.cpu_s += other.cpu_s
        self.opening_cpu_s += other.opening_cpu_s
        self.wall_s += other.wall_s
        self.sessions += other.sessions
        self.upstream_requests += other.upstream_requests


@dataclass(frozen=True)
class Load:
    """A number of connections, each with sessions of some turns after the first."""

    connections: int
    turns: int
    sessions: int = 1
    """Number of sessions on each connection, one after the other."""
    stream: bool = False
    chunks: int = 0


async def measure(
    origin: str, load: Load, make: Callable[[], Session], cpu: Callable[[], float]
) -> Sample:
    """Run a load.

    The first request of each session counts separately: it is a new prompt, and a session has only
    one.
    """
    sample = Sample()
    clients = [Client(origin) for _ in range(load.connections)]
    try:
        for _ in range(load.sessions):
            sample.add(await _measure(clients, [make() for _ in clients], load, cpu))
    finally:
        await asyncio.gather(*(client.aclose() for client in clients))
    return sample


async def _measure(
    clients: Sequence[Client],
    sessions: Sequence[Session],
    load: Load,
    cpu: Callable[[], float],
) -> Sample:
    sample = Sample(sessions=len(sessions))
    begun = cpu()
    for client, session in zip(clients, sessions, strict=True):
        await client.post(session.next_request(stream=load.stream, chunks=load.chunks))
    opened, started = cpu(), perf_counter()
    for took in await asyncio.gather(
        *(_agent(client, each, load) for client, each in zip(clients, sessions, strict=True))
    ):
        sample.seconds += took
    sample.wall_s = perf_counter() - started
    sample.opening_cpu_s, sample.cpu_s = opened - begun, cpu() - opened
    return sample


async def _agent(client: Client, session: Session, load: Load) -> list[float]:
    return [await client.post(body) for body in _bodies(session, load)]


def _bodies(session: Session, load: Load) -> Iterator[bytes]:
    for _ in range(load.turns):
        yield session.next_request(stream=load.stream, chunks=load.chunks)
