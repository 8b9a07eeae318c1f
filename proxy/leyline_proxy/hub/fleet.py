"""The workers themselves: who is up, and what operators tell all of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count
from time import monotonic

import msgspec
import structlog

from ..telemetry.logging import frames_of
from .link import HubLink, Welcome
from .server import Handlers, Member, Part
from .wire import A, Method, Q, Topic, packed, unpacked

log = structlog.get_logger("leyline.workers")

BEAT_S = 1.0


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """A worker's first words."""

    index: int
    pid: int


class _Draining(msgspec.Struct, array_like=True, frozen=True):
    upstream: str
    draining: bool


class _Order(msgspec.Struct, array_like=True, frozen=True):
    number: int
    kind: str
    body: msgspec.Raw


class _Everyone(msgspec.Struct, array_like=True, frozen=True):
    kind: str
    body: msgspec.Raw


class _Done(msgspec.Struct, array_like=True, frozen=True):
    number: int
    body: msgspec.Raw
    fault: str = ""


HELLO = Method("fleet.hello", Hello, Welcome)
READY = Method("fleet.ready", dict[str, str], type(None))
BEAT = Method("fleet.beat", type(None), type(None))
COUNTED = Method("fleet.counted", int, type(None))
DRAIN = Method("fleet.drain", _Draining, type(None))
EVERYONE = Method("fleet.everyone", _Everyone, list[msgspec.Raw])
DONE = Method("fleet.done", _Done, type(None))
DRAINING = Topic("fleet.draining", _Draining)
ORDERS = Topic("fleet.orders", _Order)


class WorkerFaultError(Exception):
    """A worker failed an order; the message is the name of its error."""


class HubFleet(Part):
    """The workers that are up.

    Args:
        claims: returns the audit log's numbers of claim events, for new workers.
        joined: called with each worker that has come.
        ready: called with the number of a worker that serves, and its lines for the banner.
        gone: called with the number of a worker that serves no more.
        counted: called with a worker's number, and the number of its open connections.
    """

    def __init__(
        self,
        *,
        claims: Callable[[], Mapping[str, int]],
        joined: Callable[[Member], object],
        ready: Callable[[int, Mapping[str, str]], object],
        gone: Callable[[int], object],
        counted: Callable[[int, int], object],
    ) -> None:
        self._claims = claims
        self._joined = joined
        self._ready = ready
        self._gone = gone
        self._counted = counted
        self._indices: dict[Member, int] = {}
        self._beats: dict[int, float] = {}
        self._draining: set[str] = set()
        self._orders = count(1)
        self._awaited: dict[int, dict[Member, asyncio.Future[msgspec.Raw]]] = {}

    def handlers(self, handlers: Handlers) -> None:
        handlers.add(HELLO, self._hello)
        handlers.add(READY, self._serves)
        handlers.add(COUNTED, self._count)
        handlers.add(BEAT, lambda member, _: self._beat(member))
        handlers.add(DRAIN, lambda _, told: self._drain(told))
        handlers.add(EVERYONE, self._everyone)
        handlers.add(DONE, self._done)

    def left(self, member: Member) -> None:
        """Forget a worker."""
        index = self._indices.pop(member, None)
        if index is not None and index not in self._indices.values():
            self._beats.pop(index, None)
            self._gone(index)
        for awaited in self._awaited.values():
            if (answer := awaited.pop(member, None)) is not None:
                answer.cancel()

    def silent_s(self, index: int) -> float:
        """Return the seconds since a worker's last sign of life; 0 if it hasn't come yet."""
        last = self._beats.get(index)
        return monotonic() - last if last is not None else 0.0

    def _hello(self, member: Member, hello: Hello) -> Welcome:
        self._indices[member] = hello.index
        self._beat(member)
        self._joined(member)
        return Welcome(tuple(self._draining), dict(self._claims()))

    def _serves(self, member: Member, lines: Mapping[str, str]) -> None:
        self._ready(self._indices[member], lines)

    def _beat(self, member: Member) -> None:
        self._beats[self._indices[member]] = monotonic()

    def _count(self, member: Member, connections: int) -> None:
        self._counted(self._indices[member], connections)

    def _drain(self, told: _Draining) -> None:
        (self._draining.add if told.draining else self._draining.discard)(told.upstream)
        for member in self._indices:
            member.push(DRAINING, told)

    async def _everyone(self, _: Member, asked: _Everyone) -> list[msgspec.Raw]:
        """Return the workers' answers. One that dies has no state left that an answer could be of;
        one that hangs is killed."""
        order, loop = next(self._orders), asyncio.get_running_loop()
        awaited = self._awaited[order] = {each: loop.create_future() for each in self._indices}
        for member in awaited:
            member.push(ORDERS, _Order(order, asked.kind, asked.body))
        try:
            answers = [*awaited.values()]
            if answers:
                await asyncio.wait(answers)
            return [each.result() for each in answers if not each.cancelled()]
        finally:
            del self._awaited[order]

    def _done(self, member: Member, answer: _Done) -> None:
        waiting = self._awaited.get(answer.number, {}).get(member)
        if waiting is None or waiting.done():
            return
        if answer.fault:
            waiting.set_exception(WorkerFaultError(answer.fault))
        else:
            waiting.set_result(answer.body)


@asynccontextmanager
async def connected(link: HubLink) -> AsyncIterator[None]:
    """Hold a link open, and read the hub's first words."""
    await link.open()
    try:
        link.welcome = await link.ask(HELLO, Hello(link.index, os.getpid()))
        yield
    finally:
        await link.aclose()


class Fleet:
    """A worker's side: it follows what operators tell any of the workers.

    Args:
        drain: takes an engine's name, and True to give it no more sessions.
    """

    def __init__(self, link: HubLink, *, drain: Callable[[str, bool], object]) -> None:
        self.index = link.index
        """This worker's number."""
        self._link = link
        self._drain = drain
        self._followers: dict[str, Callable[[msgspec.Raw], Awaitable[msgspec.Raw]]] = {}
        self._following: set[asyncio.Task[None]] = set()
        self._connections = 0
        link.on(DRAINING, lambda told: drain(told.upstream, told.draining))
        link.on(ORDERS, self._ordered)

    def begin(self) -> None:
        """Follow what was told before this worker came."""
        for upstream in self._link.welcome.draining:
            self._drain(upstream, True)

    async def run(self) -> None:
        """Send signs of life, until cancelled."""
        while True:
            self._link.tell(BEAT, None)
            await asyncio.sleep(BEAT_S)

    def ready(self, facts: Mapping[str, str]) -> None:
        """Report that this worker serves."""
        self._link.tell(READY, dict(facts))

    def counted(self, connections: int) -> None:
        """Report the number of this worker's open connections, if it has changed."""
        if connections != self._connections:
            self._connections = connections
            self._link.tell(COUNTED, connections)

    async def drain(self, upstream: str, draining: bool) -> None:
        """Have all workers drain an engine, or not any more."""
        await self._link.ask(DRAIN, _Draining(upstream, draining))

    def follow(self, order: Method[Q, A], follower: Callable[[Q], Awaitable[A]]) -> None:
        """Have ``follower`` carry out an order to all workers."""

        async def followed(body: msgspec.Raw) -> msgspec.Raw:
            return packed(await follower(unpacked(body, order.asks)))

        self._followers[order.name] = followed

    async def everyone(self, order: Method[Q, A], question: Q) -> list[A]:
        """Give an order to all workers, this one included, and return their answers.

        Raises:
            HubFaultError: a worker failed.
        """
        found = await self._link.ask(EVERYONE, _Everyone(order.name, packed(question)))
        return [unpacked(each, order.answers) for each in found]

    def _ordered(self, order: _Order) -> None:
        task = asyncio.create_task(self._follow(order))
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    async def _follow(self, order: _Order) -> None:
        try:
            done = _Done(order.number, await self._followers[order.kind](order.body))
        except Exception as error:
            kind = type(error).__name__
            log.error("order_failed", order=order.kind, error=kind, frames=frames_of(error))
            done = _Done(order.number, packed(None), kind)
        self._link.tell(DONE, done)
