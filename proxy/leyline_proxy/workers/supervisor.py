"""The process above the workers: it starts them, holds what they share, and starts dead ones again.

It serves no request itself. Its folder, which only its user can enter, has the Unix sockets of the
hub and of an embedded engine, and the files in which processes add up their metrics.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from secrets import token_hex

import structlog

from ..audit.writer import AuditWriter
from ..http.handed import ADMIN, END, PORT
from ..http.listening import Listener
from ..hub.audit import HubAudit
from ..hub.budgets import HubBudgets
from ..hub.debts import HubDebts
from ..hub.feed import HubFeed
from ..hub.fleet import HubFleet
from ..hub.places import HubPlaces
from ..hub.responses import HubResponses
from ..hub.server import HubServer, Member, Part
from ..hub.sessions import HubSessions
from ..hub.spaces import HubSpace
from ..parts.memory import MemorySpace
from ..settings import Settings
from ..telemetry.exposition import enter, leave
from ..telemetry.metrics import Metrics
from ..wiring.audit import build_audit_writer
from ..wiring.stores import build_response_shelf
from .orders import EngineOrder, WorkerOrder, packed

_FIRST_PAUSE_S = 0.2
_LAST_PAUSE_S = 30.0
_STEADY_S = 60.0
"""A process that ran for so long is started again at once."""

_RETRY_S = 0.02
log = structlog.get_logger("leyline.workers")

SILENT_S = 30.0
"""A worker without a sign of life for so long is killed, and started again."""

_AUDIT_S = 5.0
_BACKLOG = 2048
Announce = Callable[[Mapping[str, str]], None]


class Child:
    """One process, and its successors.

    Args:
        module: run as ``python -m``.
        order: returns the order for the next process.
        files: descriptors that it inherits.
        name: for logs.
    """

    def __init__(
        self,
        module: str,
        order: Callable[[], WorkerOrder | EngineOrder],
        *,
        name: str,
        files: Sequence[int] = (),
    ) -> None:
        self._module = module
        self._order = order
        self._name = name
        self._files = tuple(files)
        self._process: asyncio.subprocess.Process | None = None
        self.stopping = False
        self._stopped = asyncio.Event()
        self.served = False
        """True once a process of this child has served."""

    async def run(self) -> int:
        """Run processes until one ends that must not be followed; return its exit status.

        That is one before any has served: it would fail again in the same way.
        """
        loop, pause_s = asyncio.get_running_loop(), _FIRST_PAUSE_S
        while True:
            began = loop.time()
            status = await self._run_one()
            if self.stopping or not self.served:
                return status
            lasted = loop.time() - began
            pause_s = _FIRST_PAUSE_S if lasted > _STEADY_S else min(_LAST_PAUSE_S, 2 * pause_s)
            log.error("process_died", process=self._name, status=status, lasted_s=round(lasted, 1))
            if await self._stops_within(pause_s):
                return status

    def send(self, number: int) -> None:
        """Send a signal to the process, if it runs."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the process for good."""
        self.stopping = True
        self._stopped.set()
        self.send(number)

    async def _stops_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True

    async def _run_one(self) -> int:
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # nothing is imported from the current directory, as in this process
            "-m",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            pass_fds=self._files,
            env={**os.environ},
            start_new_session=True,  # keyboard signals reach it through the supervisor
        )
        assert process.stdin is not None  # noqa: S101 - asked for
        with suppress(OSError):
            process.stdin.write(packed(self._order()))
            await process.stdin.drain()
        try:
            return await process.wait()
        finally:
            process.stdin.close()


class _Desk:
    """One worker's place."""

    def __init__(self) -> None:
        # Kept by the supervisor, too: what a killed worker hasn't taken is its successor's.
        self.inside, self.outside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.inside.setblocking(False)
        self.open = False
        self.connections = 0
        """Open connections, as the worker last counted them, and those given since."""


class Porter:
    """Gives connections to workers.

    Args:
        workers: number of workers.
    """

    def __init__(self, workers: int) -> None:
        self._desks = [_Desk() for _ in range(workers)]
        self._opened = asyncio.Event()

    def file(self, worker: int) -> int:
        """Return the file descriptor that a worker inherits."""
        return self._desks[worker].outside.fileno()

    def open(self, worker: int) -> None:
        """Give a worker connections from now on."""
        self._desks[worker].open = True
        self._desks[worker].connections = 0
        self._opened.set()

    def close(self, worker: int) -> None:
        """Give a worker none for now."""
        self._desks[worker].open = False
        if not any(desk.open for desk in self._desks):
            self._opened.clear()

    def counted(self, worker: int, connections: int) -> None:
        """Take a worker's own number of open connections."""
        self._desks[worker].connections = connections

    async def give(self, port: int, sock: socket.socket) -> None:
        """Give a connection to a worker; wait while there is none that can take it."""
        with sock:
            while True:
                await self._opened.wait()
                for desk in self._by_load():
                    with suppress(OSError):  # full, or its worker has just gone
                        socket.send_fds(desk.inside, [bytes([port])], [sock.fileno()])
                        desk.connections += 1
                        return
                await asyncio.sleep(_RETRY_S)

    def end(self) -> None:
        """Tell all workers that no more will come."""
        for desk in self._desks:
            with suppress(OSError):
                desk.inside.send(bytes([END]))

    def aclose(self) -> None:
        """Close all sockets."""
        for desk in self._desks:
            desk.inside.close()
            desk.outside.close()

    def _by_load(self) -> Iterable[_Desk]:
        return sorted(
            (desk for desk in self._desks if desk.open), key=lambda desk: desk.connections
        )


class Supervisor:
    """Runs workers until a signal ends it.

    Args:
        sock: the port's socket, bound.
        admin: the admin port's.
        folder: of :func:`.folder.own_folder`.
        announce: called with the facts of the banner once all workers serve.
    """

    def __init__(
        self,
        settings: Settings,
        sock: socket.socket,
        admin: socket.socket | None,
        folder: Path,
        announce: Announce,
    ) -> None:
        self._settings = settings
        self._porter = Porter(settings.workers)
        self._doors = [Listener(sock, partial(self._porter.give, PORT), _BACKLOG)]
        if admin is not None:
            self._doors.append(Listener(admin, partial(self._porter.give, ADMIN), _BACKLOG))
        self._announce = announce
        self._folder = folder
        self._secret = token_hex(32)
        self._workers: list[Child] = []
        self._engine: Child | None = None
        self._ready: dict[int, Mapping[str, str]] = {}
        self._first = asyncio.Event()
        """Set once a worker has served."""
        self._closing: asyncio.Task[None] | None = None
        self._announced = False

    async def run(self) -> int:
        """Return the exit status, after all workers have ended.

        Raises:
            AuditError: this proxy may not write to the audit log.
        """
        async with AsyncExitStack() as stack:
            fleet = await stack.enter_async_context(self._hub())
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self._stop, number)
            if not self._settings.engines():
                failed = await stack.enter_async_context(self._engine_beside())
                if failed is not None:
                    return failed
            return await self._run_workers(fleet)

    @asynccontextmanager
    async def _hub(self) -> AsyncIterator[HubFleet]:
        """Hold what the workers share."""
        settings, parts = self._settings, dict[str, Part]()
        writer = await self._audit_writer()
        if writer is not None:
            parts["audit"] = HubAudit(writer)
        feed = parts["feed"] = HubFeed()
        budgets = parts["budgets"] = HubBudgets()

        def joined(member: Member) -> None:
            feed.joined(member)
            budgets.joined(member)

        fleet = parts["fleet"] = HubFleet(
            claims=lambda: writer.positions() if writer is not None else {},
            joined=joined,
            ready=self._serves,
            gone=self._porter.close,
            counted=self._porter.counted,
        )
        sessions = parts["sessions"] = HubSessions(
            max_sessions=settings.max_sessions,
            max_bytes=settings.max_session_bytes,
            ttl_s=settings.session_ttl_s,
            idle_pack_s=settings.session_idle_s,
        )
        parts["debts"] = HubDebts()
        parts["places"] = HubPlaces(settings.max_concurrent)
        parts["responses"] = HubResponses(build_response_shelf(settings))
        parts["space"] = HubSpace(MemorySpace(settings.recall_memory_bytes))
        server = HubServer(self._folder / "hub", parts)
        await server.open()
        packing = asyncio.create_task(sessions.run())
        try:
            yield fleet
        finally:
            packing.cancel()
            await asyncio.wait((packing,))
            await server.aclose()
            if writer is not None:
                await asyncio.to_thread(writer.close, _AUDIT_S)

    async def _audit_writer(self) -> AuditWriter | None:
        if self._settings.audit_file is None:
            return None
        writer = build_audit_writer(self._settings, Metrics())
        leave()  # the workers set the gauges; here each would stay 0
        writer.claim()
        await asyncio.to_thread(writer.start)
        return writer

    @asynccontextmanager
    async def _engine_beside(self) -> AsyncIterator[int | None]:
        """Run the embedded engine; yield its exit status if it can't start."""
        settings, path = self._settings, self._folder / "engine"
        options = dict(settings.engine_options)
        if settings.model is not None:
            options["model"] = settings.model
        order = EngineOrder(settings.engine, options, path, settings.log_level, settings.log_format)
        engine = self._engine = Child("leyline_proxy.workers.engine", lambda: order, name="engine")
        running = asyncio.create_task(engine.run())
        try:
            while not path.exists() and not running.done():  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0.05)
            if running.done():
                yield running.result()
                return
            engine.served = True
            yield None
        finally:
            engine.stop()
            await running

    async def _run_workers(self, fleet: HubFleet) -> int:
        settings = self._settings
        for index in range(settings.workers):
            self._workers.append(
                Child(
                    "leyline_proxy.workers.worker",
                    partial(self._order, index),
                    name=f"worker {index}",
                    files=[self._porter.file(index)],
                )
            )
        first, *others = self._workers
        running = [asyncio.create_task(self._run_worker(first))]
        watching = asyncio.create_task(self._watch(fleet))
        try:
            # What is wrong with the settings is reported once.
            await asyncio.wait(
                (running[0], asyncio.ensure_future(self._first.wait())),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._first.is_set():
                running += [asyncio.create_task(self._run_worker(each)) for each in others]
            statuses = await asyncio.gather(*running)
        finally:
            watching.cancel()
            await asyncio.wait([watching, *([self._closing] if self._closing else [])])
            self._porter.aclose()
        return next((status for status in statuses if status > 0), 0)

    async def _run_worker(self, worker: Child) -> int:
        status = await worker.run()
        if not worker.stopping:
            self._stop(signal.SIGTERM)
            return status or 1
        return max(0, status)

    def _order(self, index: int) -> WorkerOrder:
        share = self._settings.model_copy(
            update={"text_memory_bytes": self._settings.text_memory_bytes // self._settings.workers}
        )
        return WorkerOrder(
            share,
            index,
            self._folder / "hub",
            self._secret,
            self._porter.file(index),
            self._folder / "engine" if self._engine is not None else None,
        )

    def _serves(self, index: int, facts: Mapping[str, str]) -> None:
        self._workers[index].served = True
        self._ready[index] = facts
        self._first.set()
        self._porter.open(index)
        if len(self._ready) == len(self._workers) and not self._announced:
            self._announced = True
            for door in self._doors:
                door.start()
            self._announce({**self._ready[0], "workers": str(len(self._workers))})

    def _stop(self, number: int) -> None:
        """Pass a signal to stop on. Workers get connections until they take no more."""
        if self._closing is None:
            # Without an announcement nobody sends requests, which a delay would be for.
            waits = number == signal.SIGTERM and self._announced
            delay_s = self._settings.shutdown_delay_s if waits else 0.0
            self._closing = asyncio.create_task(self._close_doors(delay_s))
        for worker in self._workers:
            worker.stop(number)

    async def _close_doors(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        if self._announced:
            await asyncio.gather(*(door.close() for door in self._doors))
        self._porter.end()

    async def _watch(self, fleet: HubFleet) -> None:
        """Kill workers that hang, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            for index, worker in enumerate(self._workers):
                silent_s = fleet.silent_s(index)
                if silent_s > SILENT_S and not worker.stopping:
                    log.error("worker_hangs", worker=index, silent_s=round(silent_s))
                    worker.send(signal.SIGKILL)


def supervise(
    settings: Settings,
    sock: socket.socket,
    admin: socket.socket | None,
    folder: Path,
    announce: Announce,
) -> int:
    """Run the workers of a proxy, and return the exit status; see :class:`Supervisor`."""

    enter("supervisor")

    async def run() -> int:
        return await Supervisor(settings, sock, admin, folder, announce).run()

    factory = None
    if settings.loop != "asyncio":
        with suppress(ImportError):
            import uvloop

            factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(run())
