"""A real engine on a loopback port, as a process in an environment of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from random import SystemRandom

import httpx

from ..errors import EngineProcessError
from ..packages import replay_engine

SHIPPED_NAME = "leyline-recall"
_START_S = 600.0
_STOP_S = 30.0
_LOG_LINES = 25


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine that has an environment of its own."""

    name: str
    packages: tuple[str, ...]
    """Distributions of which one is installed where the engine is."""
    variable: str
    """Environment variable: interpreter of the environment with the engine."""
    checkout: Path
    """Its interpreter in a checkout."""
    setup: str
    """The command that makes the environment in a checkout."""

    def python(self, flag: str = "--url") -> str:
        """Return an interpreter with the engine: the variable's, this one, or the checkout's.

        Args:
            flag: the command's flag for a running server.

        Raises:
            EngineProcessError: there is none.
        """
        if named := os.environ.get(self.variable):
            return named
        for package in self.packages:
            with suppress(PackageNotFoundError):
                distribution(package)
                return sys.executable
        if self.checkout.exists():
            return str(self.checkout.absolute())
        raise EngineProcessError(
            f"{self.name} isn't installed here. In a checkout: {self.setup}. Elsewhere, name the "
            f"Python that has it in {self.variable}, or give the address of a server that runs: "
            f"{flag}"
        )


def shipped_model() -> Path:
    """Return the folder of the trained model that ships with the replay engine.

    Raises:
        EngineUnavailable: the replay engine isn't installed.
    """
    with replay_engine():
        from leyline_replay.models.trained import trained_model_dir
    folder = trained_model_dir(SHIPPED_NAME)
    assert folder is not None
    return folder


def shipped_folder(name: str) -> Path | None:
    """Return the folder of a trained model that ships with the replay engine; None for others."""
    try:
        from leyline_replay.models.trained import trained_model_dir
    except ModuleNotFoundError:
        return None
    return trained_model_dir(name)


@contextmanager
def engine_server(
    kind: EngineKind,
    module: str,
    flags: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
) -> Iterator[EngineProcess]:
    """Run a healthy server, and stop it at the end.

    Args:
        module: run as ``python -m``.
        flags: of the server; its address is added.
        log: file for all its output.
        environment: variables added to this process's.

    Raises:
        EngineProcessError: it doesn't come up.
    """
    port = _free_port()
    address = ("--host", "127.0.0.1", "--port", str(port))
    command = [kind.python(), "-P", "-m", module, *flags, *address]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | dict(environment),
            start_new_session=True,
        )
    server = EngineProcess(kind.name, process, f"http://127.0.0.1:{port}", log)
    try:
        server.wait_healthy()
        yield server
    finally:
        server.stop()


class EngineProcess:
    """A started server; see :func:`engine_server`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self._name = name
        self._process = process
        self.url = url
        self._log = log

    @property
    def pid(self) -> int:
        """Process id of the launcher, parent of the engine's other processes."""
        return self._process.pid

    def wait_healthy(self) -> None:
        """Wait until the server answers.

        Raises:
            EngineProcessError: it died, or doesn't answer within ten minutes.
        """
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise EngineProcessError(f"{self._name} died at its start:\n{self._log_end()}")
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=10).status_code == httpx.codes.OK:
                    return
            time.sleep(0.25)
        raise EngineProcessError(f"{self._name} did not come up:\n{self._log_end()}")

    def stop(self) -> None:
        """End the server with all its processes."""
        self._process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        # Processes that outlive the launcher are still in its session.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_STOP_S)

    def _log_end(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])


def _free_port() -> int:
    """Return a free port below the ephemeral range: the server binds it only some 20 s later."""
    while True:
        port = SystemRandom().randrange(20_000, 30_000)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
