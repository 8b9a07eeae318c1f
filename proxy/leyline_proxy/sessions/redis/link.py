"""The connection to Redis, with short time limits and a circuit breaker that avoids vain waits."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import structlog
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as ConnectionFailed
from redis.exceptions import NoScriptError, RedisClusterException, RedisError, ResponseError

from .scripts import Script

log = structlog.get_logger("leyline.sessions")

T = TypeVar("T")

CLUSTER = "+cluster"
SCHEMES = ("redis", "rediss", f"redis{CLUSTER}", f"rediss{CLUSTER}")

_RUN_ID = re.compile(rb"run_id:(\w+)")
_NO_WRITES = re.compile(r"\b(MISCONF|NOREPLICAS|BUSY|OOM|READONLY|LOADING|MASTERDOWN)\b")
"""Codes of a server that refuses every write or every command. The client has no exceptions for
some of them, and older servers report those of a script within an error of the script."""
_UNASKED = "not asked yet"
_SPARE_S = 0.25
"""Seconds added to the sockets' limits, for name look-ups and other steps without a limit."""


_FAILURES = (RedisError, RedisClusterException, OSError, TimeoutError)
"""Exceptions of a client; it doesn't report an unreachable cluster as a RedisError."""

_RETRY_S = 1.0
"""Pause between two tries while Redis can't be reached."""


class StoreGoneError(Exception):
    """Redis can't be asked now."""


class StoreRefusedError(StoreGoneError):
    """Redis is there, and refused this one command."""


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Options of the connection to Redis."""

    url: str = field(repr=False)
    """``redis://``, ``rediss://`` (TLS), with ``+cluster`` after the scheme for a cluster; may
    contain a password."""
    ca_file: str | None = None
    """Certificate authorities for checking servers, in place of the system's."""
    connect_timeout_s: float = 0.25
    timeout_s: float = 0.5
    """Limit for one command, or for several sent together."""
    max_connections: int = 64
    """Connections to each server."""


class RedisLink:
    """One client for everything stored in Redis.

    The circuit opens with the first failure, for all. Only :meth:`close_circuit` closes it again;
    it is for the one task that checks if Redis is back.

    Args:
        whose: the store, in the names of log events.
    """

    def __init__(self, options: RedisOptions, whose: str = "session_store") -> None:
        self._options = options
        self._whose = whose
        self._clustered = clustered(options)
        self._slots = asyncio.Semaphore(options.max_connections)
        own = {} if self._clustered else {"redis_connect_func": self._connected}
        self._client = client_of(options, **own)
        self._runs: Mapping[str, str] = {}
        self.problem: str | None = _UNASKED
        """Reason for an open circuit; None while it is closed."""

    async def call(self, command: Callable[[Any], Awaitable[T]], *, probe: bool = False) -> T:
        """Return the result of ``command``, called with the client.

        Args:
            probe: True to try with an open circuit.

        Raises:
            StoreGoneError: the circuit is open, or the command failed, which opens it.
            StoreRefusedError: Redis refused the command, which says nothing about others.
        """
        if self.problem is not None and not probe:
            raise StoreGoneError
        limit = self._options.timeout_s + self._options.connect_timeout_s + _SPARE_S
        cancelled = _cancelled()
        try:
            async with asyncio.timeout(limit), self._slots:
                answer = await command(self._client)
            if _cancelled() > cancelled:
                # The client sends by asyncio.wait_for, which in Python 3.11 may swallow it.
                raise asyncio.CancelledError
            return answer
        except _FAILURES as error:
            # A plain refusal of one command says nothing about the next.
            if type(error) is ResponseError and not _NO_WRITES.search(str(error)):
                log.warning(f"{self._whose}_refused", error=type(error).__name__)
                raise StoreRefusedError from None
            self._failed(error)
            raise StoreGoneError from None

    async def run(
        self, script: Script, keys: Sequence[str], *arguments: Any, probe: bool = False
    ) -> Any:
        """Return the result of a script; raise the errors of :meth:`call`."""
        return await self.call(
            lambda client: evaluate(client, script, keys, *arguments), probe=probe
        )

    async def together(
        self, commands: Callable[[Any], object], *, empty: bool = False
    ) -> list[Any]:
        """Return the answers to several commands in one round trip (in a cluster, one per server).

        Args:
            commands: puts the commands into the given pipeline.
            empty: True if there are none; Redis isn't asked then.

        Raises:
            StoreGoneError: see :meth:`call`.
        """

        async def send(client: Any) -> list[Any]:
            async with client.pipeline(transaction=False) as pipe:
                commands(pipe)
                answers: list[Any] = await pipe.execute()
                return answers

        return [] if empty else await self.call(send)

    async def look(self) -> dict[str, str]:
        """Return servers and their runs, for a probe; a restart gives a server a new run.

        Raises:
            StoreGoneError: Redis isn't back.
        """
        return await self.call(self._ask_runs, probe=True)

    def close_circuit(self, runs: Mapping[str, str]) -> None:
        """Close the circuit: Redis is back, in these runs, and knows the losses."""
        self._runs = runs
        if self.problem is not None:
            log.info(f"{self._whose}_up")
        self.problem = None

    async def aclose(self) -> None:
        """Close all connections."""
        try:
            await self._client.aclose()
        except _FAILURES:
            return

    def _failed(self, error: BaseException) -> None:
        if self.problem in (None, _UNASKED):
            log.warning(f"{self._whose}_gone", error=type(error).__name__)
        kind = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
        if type(error) is ResponseError and (code := _NO_WRITES.search(str(error))):
            kind = code[0]
        self.problem = f"Redis is out of reach ({kind})"

    async def _ask_runs(self, client: Any) -> dict[str, str]:
        if not self._clustered:
            return {"": _run_of(await client.execute_command("INFO", "server"))}
        await client.initialize()
        found = {}
        for node in client.get_primaries():
            answer = await client.execute_command("INFO", "server", target_nodes=node)
            found[node.name] = _run_of(answer)
        return found

    async def _connected(self, connection: Any) -> None:
        """Fail a new connection of the pool that leads to another run of a server.

        The pool replaces broken connections silently, and a restarted server may have lost its
        latest writes: sessions would be older than the engine's.
        """
        await connection.on_connect()
        await connection.send_command("INFO", "server")
        run = _run_of(await connection.read_response())
        if self.problem is None and self._runs.get("", run) != run:
            raise ConnectionFailed("another run of the server")


def client_of(options: RedisOptions, **own: Any) -> Any:
    """Return a client of Redis or of a cluster. It never retries, because a request would wait."""
    if options.ca_file is not None:
        own["ssl_ca_certs"] = options.ca_file
    kind = RedisCluster if clustered(options) else Redis
    return kind.from_url(
        options.url.replace(f"{CLUSTER}://", "://", 1),
        socket_connect_timeout=options.connect_timeout_s,
        socket_timeout=options.timeout_s,
        max_connections=options.max_connections,
        retry=Retry(NoBackoff(), 0),
        **own,
    )


def clustered(options: RedisOptions) -> bool:
    """Return True for a cluster's URL."""
    return urlsplit(options.url).scheme.endswith(CLUSTER)


async def evaluate(client: Any, script: Script, keys: Sequence[str], *arguments: Any) -> Any:
    """Run a script by its name, or by its text if the server doesn't know it yet."""
    try:
        return await client.evalsha(script.sha, len(keys), *keys, *arguments)
    except NoScriptError:
        return await client.eval(script.text, len(keys), *keys, *arguments)


def _cancelled() -> int:
    """Return how often the current task was asked to end."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


def _run_of(answer: Any) -> str:
    if isinstance(answer, dict):
        return str(answer.get("run_id", ""))
    raw = answer if isinstance(answer, bytes) else str(answer).encode()
    found = _RUN_ID.search(raw)
    return found[1].decode() if found else ""


class ScriptLink:
    """Runs scripts, and looks for a Redis that was gone now and then.

    Args:
        whose: the store's name in the log.
    """

    def __init__(
        self, options: RedisOptions, whose: str, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._link = RedisLink(options, whose)
        self._monotonic = monotonic
        self._retry_at = 0.0

    async def run(self, script: Script, keys: Sequence[str], *arguments: object) -> Any:
        """Return a script's answer.

        Raises:
            StoreGoneError: Redis is out of reach.
        """
        try:
            if self._link.problem is not None:
                await self._look()
            return await self._link.run(script, keys, *arguments)
        except StoreGoneError:
            if self._monotonic() >= self._retry_at:
                self._retry_at = self._monotonic() + _RETRY_S
            raise

    async def _look(self) -> None:
        if self._monotonic() < self._retry_at:
            raise StoreGoneError
        await self._link.call(lambda client: client.ping(), probe=True)
        # The link's runs protect accounts of sessions; these stores notice losses by themselves.
        self._link.close_circuit({})

    async def aclose(self) -> None:
        """Close all connections."""
        await self._link.aclose()
