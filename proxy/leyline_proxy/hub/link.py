"""A worker's connection to the hub."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import msgspec
import structlog

from ..errors import TryLaterError
from ..telemetry.logging import frames_of
from .wire import A, Answer, Ask, Connection, Frame, Method, Push, Q, Topic, packed, unpacked

log = structlog.get_logger("leyline.workers")
_RETRY_AFTER_S = 2
_FLUSH_S = 0.001


class Welcome(msgspec.Struct, array_like=True, frozen=True):
    """State from before the worker came."""

    draining: tuple[str, ...] = ()
    """Engines that get no sessions."""
    claims: dict[str, int] = {}
    """Numbers of the newest claim events in the audit log, by run of an engine."""


class HubGoneError(TryLaterError):
    """The supervisor has gone, and this worker is about to stop."""

    status = 503
    kind = "server_error"
    code = "worker_stopping"

    def __init__(self) -> None:
        super().__init__(
            "This worker has lost its supervisor and stops. Send the request again.", _RETRY_AFTER_S
        )


class HubFaultError(Exception):
    """The hub could not answer a question; its message is the name of the hub's error."""


@contextmanager
def unreachable_as(gone: type[Exception]) -> Iterator[None]:
    """Raise another error where the hub has gone, or fails."""
    try:
        yield
    except (HubGoneError, HubFaultError) as error:
        raise gone from error


class HubLink:
    """Questions to the hub, and news from it.

    Args:
        path: the hub's socket.
        index: this worker's number.
        secret: random text that all workers of this start share, for keys that nobody else needs.
        gone: called once the hub has gone.
    """

    def __init__(
        self, path: Path, index: int, secret: str, gone: Callable[[], object] = lambda: None
    ) -> None:
        self.index = index
        self.secret = secret
        self.gone = gone
        self.welcome = Welcome()
        """The hub's first words."""
        self._path = path
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._listeners: dict[str, Callable[[msgspec.Raw], object]] = {}
        self._connection: Connection | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def leads(self) -> bool:
        """True for the one worker that does what must be done once."""
        return self.index == 0

    def on(self, topic: Topic[Q], listener: Callable[[Q], object]) -> None:
        """Have ``listener`` called with news of a topic, from this link's event loop."""
        self._listeners[topic.name] = lambda body: listener(unpacked(body, topic.tells))

    async def open(self) -> None:
        """Connect.

        Raises:
            OSError: the hub can't be reached.
        """
        loop = self._loop = asyncio.get_running_loop()
        _, self._connection = await loop.create_unix_connection(
            lambda: Connection(self._received, self._ended), str(self._path)
        )

    async def ask(self, method: Method[Q, A], question: Q) -> A:
        """Return the hub's answer.

        Raises:
            HubGoneError: there is no hub any more.
            HubFaultError: the hub failed.
        """
        number = next(self._numbers)
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._send(Ask(number, method.name, packed(question)))
            return unpacked(await answer, method.answers)
        finally:
            self._waiting.pop(number, None)

    def tell(self, method: Method[Q, None], word: Q) -> None:
        """Tell the hub something, without waiting; nothing if it has gone."""
        with suppress(HubGoneError):
            self._send(Ask(0, method.name, packed(word)))

    async def leave(self, method: Method[Q, None], word: Q) -> None:
        """Tell the hub something that it will read whatever becomes of this worker.

        Raises:
            HubGoneError: there is no hub any more.
        """
        self._send(Ask(0, method.name, packed(word)))
        assert self._connection is not None  # noqa: S101 - it has just been sent
        self._connection.flush()
        while self._connection.open and self._connection.unsent:  # noqa: ASYNC110 - a late hub
            await asyncio.sleep(_FLUSH_S)

    def tell_from_thread(self, method: Method[Q, None], word: Q) -> bool:
        """Tell the hub something from another thread; return False if it has gone."""
        if self._loop is None or self._connection is None or not self._connection.open:
            return False
        try:
            self._loop.call_soon_threadsafe(self.tell, method, word)
        except RuntimeError:  # the loop is closed
            return False
        return True

    async def aclose(self) -> None:
        """Close the connection."""
        self.gone = lambda: None
        if self._connection is not None:
            self._connection.close()
            await self._connection.closed

    def _send(self, frame: Ask) -> None:
        if self._connection is None or not self._connection.open:
            raise HubGoneError
        self._connection.send(frame)

    def _ended(self) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(HubGoneError())
        self.gone()

    def _received(self, frame: Frame) -> None:
        if isinstance(frame, Push):
            listener = self._listeners.get(frame.topic)
            if listener is not None:
                try:
                    listener(frame.body)
                except Exception as error:  # news must not end the link
                    log.error(
                        "hub_news_failed",
                        topic=frame.topic,
                        error=type(error).__name__,
                        frames=frames_of(error),
                    )
            return
        answer = self._waiting.get(frame.number) if isinstance(frame, Answer) else None
        if answer is None or answer.done() or not isinstance(frame, Answer):
            return
        if frame.fault:
            answer.set_exception(HubFaultError(frame.fault))
        else:
            answer.set_result(frame.body)
