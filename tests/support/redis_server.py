"""Real Redis servers on loopback, each with a folder of its own."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis

START_S = 20.0
BUS_OFFSET = 10_000
"""Distance of a server's cluster bus port from its port."""


def program(name: str) -> str:
    """Find a program of Redis; skip the test where there is none."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: run deploy/tools.sh")
    return found


def free_port() -> int:
    """A free port whose cluster bus port is free, too.

    Both are below those that the system gives to connections, so that none takes them meanwhile.
    """
    while True:
        port = random.randrange(15_000, 22_000)
        if _is_free(port) and _is_free(port + BUS_OFFSET):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        with suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return True
        return False


class RedisServer:
    """A server that can be killed and started again."""

    def __init__(self, folder: Path, *options: str, port: int | None = None) -> None:
        self.folder = folder
        self.port = port or free_port()
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The server's address."""
        return f"redis://127.0.0.1:{self.port}/0"

    def client(self) -> redis.Redis:
        """A client for the tests' own looks and changes."""
        return redis.Redis(port=self.port, socket_timeout=5)

    def start(self) -> None:
        """Start it, and wait until it listens."""
        command = [
            *(program("redis-server"), "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--dir", str(self.folder), "--save", "", "--daemonize", "no"),
            *("--loglevel", "warning", *self._options),
        ]
        log = (self.folder / "log").open("ab")
        self._process = subprocess.Popen(command, stdout=log, stderr=log)
        log.close()
        deadline = time.monotonic() + START_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "log").read_text())
            time.sleep(0.02)

    def kill(self) -> None:
        """End it without a chance to save anything."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def pause(self) -> None:
        """Let it hang: connections stay, answers don't come."""
        assert self._process is not None
        self._process.send_signal(19)

    def resume(self) -> None:
        """Let it continue."""
        assert self._process is not None
        self._process.send_signal(18)


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    """A running server, killed at the end."""
    server = RedisServer(folder, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def redis_cluster(folder: Path, count: int = 3) -> Iterator[Sequence[RedisServer]]:
    """Servers that form a cluster, each with its share of the slots."""
    servers = []
    for number in range(count):
        home = folder / str(number)
        home.mkdir()
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        servers.append(RedisServer(home, *options))
    try:
        for server in servers:
            server.start()
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        create = [program("redis-cli"), "--cluster", "create", *addresses, "--cluster-yes"]
        subprocess.run(create, check=True, capture_output=True, timeout=60)
        for server in servers:
            with server.client() as client:
                deadline = time.monotonic() + START_S
                while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
        yield servers
    finally:
        for server in servers:
            server.kill()
