"""Processes that end with all they started, and engines among them on a loopback port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from random import SystemRandom

import httpx

from ..errors import BenchmarkError, EngineProcessError
from ..packages import replay_engine

SHIPPED_NAME = "leyline-recall"
_START_S = 600.0
_STOP_S = 30.0
_LOG_LINES = 25
_POLL_S = 0.1


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
    """Return the folder of the trained model that comes with the replay engine.

    Raises:
        EngineUnavailable: the replay engine's distribution is missing.
    """
    folder = shipped_folder(SHIPPED_NAME)
    assert folder is not None
    return folder


def shipped_folder(name: str) -> Path | None:
    """Return the folder of a trained model that comes with the replay engine; None for other names.

    Raises:
        EngineUnavailable: the replay engine's distribution is missing.
    """
    with replay_engine():
        from leyline_replay.models.trained import trained_model_dir
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
    log.unlink(missing_ok=True)
    variables = os.environ | {"HF_HUB_OFFLINE": "1"} | dict(environment)
    with started(command, Path.cwd(), variables, log, whole=False) as process:
        server = EngineProcess(kind.name, process, f"http://127.0.0.1:{port}", log)
        server.wait_healthy()
        yield server


@contextmanager
def started(
    arguments: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    log: Path,
    *,
    whole: bool = True,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command with all output appended to a log, and end it with everything it started.

    Args:
        whole: False if the command itself ends what it has started.

    Raises:
        BenchmarkError: there is no such program or folder.
        OSError: the log can't be written.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        try:
            process = subprocess.Popen(
                arguments,
                cwd=cwd,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise BenchmarkError(f"{arguments[0]} can't be run: {error.strerror}") from error
    try:
        yield process
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                (os.killpg if whole else os.kill)(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
        # Processes that outlive the command are still in its session.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_STOP_S)


def wait(process: subprocess.Popen[bytes], tick: Callable[[], None]) -> int:
    """Wait for the end of a process and return its status; call ``tick`` again and again."""
    while (status := process.poll()) is None:
        tick()
        time.sleep(_POLL_S)
    return status


def last_line(log: Path) -> str:
    """Return the last line of a log that isn't empty, cut to 200 characters."""
    with suppress(OSError):
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 8192))
            lines = file.read().decode(errors="replace").splitlines()
        for line in reversed(lines):
            if line.strip():
                return line.strip()[:200]
    return "it printed nothing"


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
