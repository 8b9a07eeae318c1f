"""The load: agents that continue their sessions, turn after turn, on connections of their own."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from leyline_proxy.model.messages import Message
from leyline_proxy.render import ChatRenderer

from .agent import FRESH_CHARS, TOOLS, rounds, session_messages, text_of_size
from .systems import System, canned_upstream, requests_of
from .upstream import MODEL

ANSWERS = 32

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
        self._base = session_messages(renderer, tokens)[:-1]
        self._made = 0

    def make(self) -> Session:
        """Return a new session."""
        self._made += 1
        mark = f"[{self._made:04d}] "
        opening = [{**each, "content": mark + each["content"]} for each in self._base]
        return Session(mark, opening, self._answers)


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
    chunks: int = 1
    """Of a stream, and the limit of an answer: with 0 it would be a pre-warm."""


async def measure(system: System, upstream: System, load: Load, sessions: Sessions) -> Sample:
    """Run a load.

    The first request of each session counts separately: it is a new prompt, and a session has only
    one.
    """
    sample, before = Sample(), requests_of(upstream)
    clients = [Client(system.origin) for _ in range(load.connections)]
    try:
        for _ in range(load.sessions):
            made = [sessions.make() for _ in clients]
            sample.add(await _measure(clients, made, load, system.cpu_s))
    finally:
        await asyncio.gather(*(client.aclose() for client in clients))
    sample.upstream_requests = requests_of(upstream) - before
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
    return [
        await client.post(session.next_request(stream=load.stream, chunks=load.chunks))
        for _ in range(load.turns)
    ]


class Canned:
    """An upstream that answers from canned bytes, and sessions that fit its answers."""

    def __init__(self, renderer: ChatRenderer, answers: Sequence[Message], document: Path) -> None:
        self._renderer, self._answers, self._document = renderer, answers, document
        self.logs = document.parent
        """A folder that is removed at the end."""

    def sessions(self, tokens: int) -> Sessions:
        """Return a maker of sessions whose first prompts have about so many tokens."""
        return Sessions(self._renderer, tokens, self._answers)

    def upstream(self) -> AbstractContextManager[System]:
        """Run the upstream in a process of its own."""
        return canned_upstream(self._document)


@contextmanager
def canned(document: dict[str, Any]) -> Iterator[Canned]:
    """Write what the upstream answers with.

    Args:
        document: an engine's renderer document.
    """
    renderer = ChatRenderer(**document)
    answers = canned_answers(renderer)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "document.json"
        path.write_text(json.dumps({"renderer": document, "answers": answers}))
        yield Canned(renderer, [each["message"] for each in answers], path)
