"""``leyline serve --workers 2`` as a process, and what its log says of its workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from .redis_server import free_port
from .waiting import wait

LEYLINE = str(Path(sys.executable).with_name("leyline"))
START_S = 120.0


class Fleet:
    """A proxy with two workers.

    Args:
        folder: for its log.
        flags: further ones of the command.
        environment: further variables.
    """

    def __init__(self, folder: Path, *flags: str, workers: int = 2, **environment: str) -> None:
        self.port = free_port()
        self.origin = f"http://127.0.0.1:{self.port}"
        self.log = folder / "log"
        command = [LEYLINE, "serve", "--port", str(self.port), "--workers", str(workers), *flags]
        (folder / "tmp").mkdir(exist_ok=True)
        self.folder = folder / "tmp"
        """Where it makes its own folder."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "TMPDIR": str(self.folder), **environment},
                stdout=log,
                stderr=log,
            )

    def wait_ready(self) -> None:
        """Wait until all workers serve."""
        deadline = time.monotonic() + START_S
        while b"Leyline is up" not in self.log.read_bytes():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Return the log's lines of an event."""
        found = []
        for line in self.log.read_text(encoding="utf-8").splitlines():
            if line.startswith("{"):
                document = json.loads(line)
                if document["event"].startswith(event):
                    found.append(document)
        return found

    def wait_served(self, session: str, workers: set[int]) -> None:
        """Wait until these workers have logged turns of a session, which may be after an answer."""
        deadline = time.monotonic() + START_S
        while workers != {
            line["worker"] for line in self.lines("turn") if line.get("session") == session
        }:
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)

    def worker_of(self, port: int) -> int:
        """Return the worker that accepted the WebSocket of a client's port."""
        deadline = time.monotonic() + START_S
        while not (accepted := self.lines(f"127.0.0.1:{port} - ")):
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        worker: int = accepted[-1]["worker"]
        return worker

    def pids(self) -> dict[int, int]:
        """Return the newest process of each worker by its number."""
        started = self.lines("Started server process")
        return {
            line["worker"]: int(line["event"].partition("[")[2].rstrip("]"))
            for line in started
            if "worker" in line
        }

    @contextmanager
    def clients(self, **options: Any) -> Iterator[tuple[httpx.Client, httpx.Client]]:
        """Clients of worker 0 and of worker 1: a connection goes to the one with the fewest."""
        with ExitStack() as stack:
            found: dict[int, httpx.Client] = {}
            while len(found) < 2:
                client = httpx.Client(base_url=self.origin, timeout=60, **options)
                stack.enter_context(client)
                found.setdefault(client.get("/readyz").json()["worker"], client)
            yield found[0], found[1]

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it; return its exit status."""
        self.process.send_signal(how)
        return self.process.wait(60)

    def close(self) -> None:
        """End it if it runs, and see that nothing of it is left."""
        if self.process.poll() is None:
            assert self.end() == 0, self.log.read_text()
        wait(lambda: not any(map(alive, self.pids().values())), seconds=30)


def alive(pid: int) -> bool:
    """Return True if a process runs."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except FileNotFoundError:
        return False


@contextmanager
def fleet(folder: Path, *flags: str, **environment: str) -> Iterator[Fleet]:
    """A proxy with two workers that serve."""
    running = Fleet(folder, *flags, **environment)
    try:
        running.wait_ready()
        yield running
    finally:
        running.close()
    assert not list(running.folder.glob("leyline-*"))
