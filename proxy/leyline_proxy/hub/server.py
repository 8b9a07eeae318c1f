"""The hub's end of the workers' connections."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from inspect import isawaitable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from ..telemetry.logging import frames_of
from .wire import A, Answer, Ask, Connection, Frame, Method, Push, Q, Topic, packed, unpacked

log = structlog.get_logger("leyline.workers")

_MOST_UNSENT = 64 << 20
"""Bytes of news that may wait for a worker that doesn't read; more is dropped."""


class Member:
    """A connected worker."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def push(self, topic: Topic[Q], news: Q) -> None:
        """Send news, unless the worker has gone, or doesn't read any more."""
        if self._connection.unsent <= _MOST_UNSENT:
            self._connection.send(Push(topic.name, packed(news)))

    def answer(self, number: int, body: msgspec.Raw, fault: str = "") -> None:
        """Answer a question, unless the worker has gone, or wants no answer."""
        if number:
            self._connection.send(Answer(number, body, fault))

    def close(self) -> None:
        """Close its connection."""
        self._connection.close()


class Handlers:
    """The hub's answers by method."""

    def __init__(self) -> None:
        self._known: dict[str, Callable[[Member, msgspec.Raw], Any]] = {}

    def add(self, method: Method[Q, A], handler: Callable[[Member, Q], A | Awaitable[A]]) -> None:
        """Have ``handler`` answer a method; it gets the worker that asks."""
        self._known[method.name] = lambda member, body: handler(member, unpacked(body, method.asks))

    def get(self, name: str) -> Callable[[Member, msgspec.Raw], Any]:
        """Return the handler of a method.

        Raises:
            LookupError: there is none.
        """
        return self._known[name]


class Part(ABC):
    """A kind of shared state."""

    @abstractmethod
    def handlers(self, handlers: Handlers) -> None:
        """Add the answers to questions about it."""

    def left(self, member: Member) -> None:  # noqa: B027 - most outlives a worker
        """Release what a worker held that has gone."""


class HubServer:
    """Answers workers' questions on a Unix socket.

    Args:
        path: of the socket, in a folder that only this user can enter.
    """

    def __init__(self, path: Path, parts: Mapping[str, Part]) -> None:
        self._path = path
        self._parts = tuple(parts.values())
        self._handlers = Handlers()
        for part in self._parts:
            part.handlers(self._handlers)
        self._server: asyncio.Server | None = None
        self._members: set[Member] = set()
        self._closing = False
        self._slow: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen from now on."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._connection, str(self._path))

    async def aclose(self) -> None:
        """Stop listening, and close all connections."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        for member in list(self._members):
            member.close()
        for task in self._slow:
            task.cancel()
        if self._slow:
            await asyncio.wait(self._slow)

    def _connection(self) -> Connection:
        def received(frame: Frame) -> None:
            if isinstance(frame, Ask):
                self._answer(member, frame)

        def ended() -> None:
            self._members.discard(member)
            for part in self._parts:
                part.left(member)

        connection = Connection(received, ended)
        member = Member(connection)
        self._members.add(member)
        if self._closing:  # it was accepted in the last moment
            member.close()
        return connection

    def _answer(self, member: Member, asked: Ask) -> None:
        try:
            found = self._handlers.get(asked.method)(member, asked.body)
        except Exception as error:
            self._failed(member, asked, error)
            return
        if not isawaitable(found):
            member.answer(asked.number, packed(found))
            return
        task = asyncio.ensure_future(self._answer_later(member, asked, found))
        self._slow.add(task)
        task.add_done_callback(self._slow.discard)

    async def _answer_later(self, member: Member, asked: Ask, found: Awaitable[object]) -> None:
        try:
            member.answer(asked.number, packed(await found))
        except Exception as error:
            self._failed(member, asked, error)

    def _failed(self, member: Member, asked: Ask, error: Exception) -> None:
        kind = type(error).__name__
        log.error("hub_failed", method=asked.method, error=kind, frames=frames_of(error))
        member.answer(asked.number, packed(None), kind)
